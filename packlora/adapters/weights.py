"""The weights of one adapter on one layer: what they begin with, and how the operator takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from packlora.adapters.expert_layout import is_scaled
from packlora.adapters.kinds import PARAMETERS, is_routed, routed, sizes
from packlora.adapters.slices import LinearSlice, Slice, slice_of
from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.lora_linear.types import COUNTER, LowRank

if TYPE_CHECKING:
    from packlora.adapters.norms import RowNorms
    from packlora.adapters.spec import ModuleSpec

Factors = tuple[torch.Tensor | None, torch.Tensor | None]


class KeepsNorms(Protocol):
    """A holder of the norms of one model's layers: linear.Attached, or Megatron's."""

    @property
    def norms(self) -> RowNorms:
        """Norms of DoRA, of all adapters."""


def parameter_shapes(spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the trainable parameters of one adapter on one module, by name; slices of those of a layer that is a slice."""
    if is_routed(spec.kind):
        return routed(spec.kind).shapes(spec, base)  # type: ignore[no-any-return]
    return low_rank_shapes(spec, *sizes(base))


def low_rank_shapes(spec: ModuleSpec, N: int, K: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a low-rank adapter of a layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.rank:
        shapes |= {"A": (spec.rank, K), "B": (N, spec.rank)}
        if spec.use_dora:
            shapes["magnitude"] = (N,)
    if spec.train_bias:
        shapes["bias"] = (N,)
    return shapes


def first_factors(spec: ModuleSpec, A: tuple[int, ...], B: tuple[int, ...], seed: int) -> Factors:
    """First values of A and B of these shapes, as PEFT's init_lora_weights draws them; None for zeros.

    True and False draw A from kaiming_uniform_ with a = sqrt(5), False B as well; gaussian A with the deviation 1 / rank;
    orthogonal both from the odd and the even rows of an orthogonal matrix [r, r], for even r. starts.py writes those of other
    starts.
    """
    generator = torch.Generator().manual_seed(seed)
    start, r, K, N = spec.start, A[0], math.prod(A[1:]), B[0]

    def uniform(rows: int, columns: int) -> torch.Tensor:
        bound = 1.0 / math.sqrt(columns)
        return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)

    if start == "gaussian":
        return torch.randn(r, K, generator=generator) / spec.rank, None
    if start == "orthogonal":
        Q_rr, _ = torch.linalg.qr(torch.randn(r, r, generator=generator))
        A_Kr = torch.randn(K, r // 2, generator=generator) @ Q_rr[0::2] / 10
        return A_Kr.T, torch.randn(r // 2, N, generator=generator).T @ Q_rr[1::2] / 10
    A_rK = uniform(r, K)
    # a row of B has but the ranks of its group, where a convolution has groups
    return A_rK, uniform(N, r)[:, : B[1]] * (r // B[1]) ** 0.5 if start is False else None


class TrainedWeights:
    """Trainable parameters of one adapter on one module, by name.

    Args:
        room: where they lie, by name: zeros of parameter_shapes, on the module's device. A and B get their first values, drawn
            whole: the same in any number of slices.
        seed: of the first values.
        shard: which slices of them are here; None: they are whole.
    """

    copies_embedding = False
    """Whether they are a whole embedding of the job's own."""

    def __init__(
        self, spec: ModuleSpec, room: Mapping[str, torch.Tensor], seed: int = 0, shard: Slice | None = None
    ) -> None:
        self.spec, self.shard = spec, shard
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in room.items()}
        for name, tensor in room.items():
            if tensor._base is not None:  # all of an adapter lie in one tensor, of which a parameter has the version
                setattr(self.parameters[name], COUNTER, tensor._base)
        self.draw(seed)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Write the first values of A and B into zeros."""
        if "A" not in self.parameters:
            return
        factors = [self.parameters[name] for name in "AB"]
        A, B = (self.whole_shape(name, own.shape) for name, own in zip("AB", factors, strict=True))
        for name, own, whole in zip("AB", factors, self.first_factors(A, B, seed), strict=True):
            if whole is not None:
                own.copy_(self.own(name, whole).reshape(own.shape))

    def first_factors(self, A: tuple[int, ...], B: tuple[int, ...], seed: int) -> Factors:
        """First values of A and B of these shapes, None for zeros."""
        return first_factors(self.spec, A, B, seed)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.parameters)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a parameter over all processes, from its shape here."""
        return tuple(shape) if self.shard is None else self.shard.whole_shape(name, shape)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Part of a whole parameter that is here."""
        return whole if self.shard is None else self.shard.own(name, whole)


class AdapterWeights(TrainedWeights):
    """Trainable parameters of one adapter on one layer.

    A [r, K], B [N, r], magnitude [N], bias [N]; those that the spec does not have are None.

    Magnitude and bias get their first values from `first_values`.
    """

    shard: LinearSlice | None

    def __init__(self, spec: ModuleSpec, base: torch.nn.Linear, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, room, seed, slice_of(base))
        self.A, self.B, self.magnitude, self.bias = map(self.parameters.get, ("A", "B", "magnitude", "bias"))

    def first_values(
        self, frozen: Callable[[], FrozenWeight], bias_N: torch.Tensor | None, attached: KeepsNorms
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """First values of the magnitude and the bias, which are made of the frozen layer: for the caller to write, when it has
        them of all layers. One write moves the version of all parameters of a job, and so makes all of its norms anew.

        Args:
            frozen: gives the layer's weight as it is when it is asked.
            bias_N: of the layer.
        """
        made = []
        if self.magnitude is not None:
            from packlora.adapters.norms import NormHandle

            assert self.A is not None and self.B is not None
            # A and B change by the job's own optimizer and by copy_, which the host sees
            self._frozen = frozen
            add_up = None if self.shard is None else self.shard.add_inputs
            self._norm = NormHandle(
                attached.norms, frozen(), self.A, self.B, self.spec.scaling, version_counted=True, add_up=add_up
            )
            made.append((self.magnitude, self._norm.get()))
        if self.bias is not None:
            assert bias_N is not None
            made.append((self.bias, bias_N.detach().clone()))
        return made

    def low_rank(self) -> LowRank:
        """Low-rank operands as the operator takes them."""
        norm = None if self.magnitude is None else self.norm
        return LowRank(self.A, self.B, self.spec.scaling, self.magnitude, norm, self.bias)

    def norm(self) -> torch.Tensor:
        """||W + s B A|| by row, [N], for the present values."""
        assert self.A is not None and self.B is not None
        return self._norm.point(self._frozen(), self.A, self.B, self.spec.scaling).get()


def shapes_at(model: torch.nn.Module, path: str, spec: ModuleSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the trainable parameters of one adapter on what is at a path, by name; the model may be without weights."""
    owner, _, leaf = path.rpartition(".")
    if spec.kind not in PARAMETERS:
        return parameter_shapes(spec, model.get_submodule(path))
    if spec.kind == "router":
        N, K = getattr(model.get_submodule(owner), leaf).shape
        with torch.device("meta"):
            return parameter_shapes(spec, torch.nn.Linear(K, N, bias=False))
    from packlora.adapters.expert_forward import frozen_at

    E, N, K = frozen_at(model.get_submodule(owner), leaf).shape
    ins, outs = (N, K) if is_scaled(model.get_submodule(owner)) else (K, N)
    shapes: dict[str, tuple[int, ...]] = {"A": (E * spec.rank, ins), "B": (outs, spec.rank * E)}
    return shapes | ({"magnitude": (E, N)} if spec.use_dora else {})
