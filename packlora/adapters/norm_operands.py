"""The operands of a norm of norms.py, and what tells whether it stands: what the host sees of them without waiting for a
device, and the check of their data on a GPU.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.row_norm.row_norm import squared_row_norm, takes_kernels
from packlora.ops.row_norm.types import NormProblem, dense_of
from packlora.ops.stamp import PLAIN, version

_NUMBERS = itertools.count()
_expired = torch.UntypedStorage._expired


class Sight:
    """Record of what the host saw of a tensor: where its data lay, in which storage and how, and its version, None where that
    is not counted (of tensors made in inference mode). The storage is not kept alive, but no other can be taken for it."""

    __slots__ = ("at", "dtype", "shape", "storage", "stride", "type", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.type, self.at, self.storage = type(tensor), tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage())
        self.shape, self.stride, self.dtype, self.version = tensor.shape, tensor.stride(), tensor.dtype, version(tensor)

    def lies(self, tensor: torch.Tensor) -> bool:
        """Whether it lies where it lay. A live storage at one address is one storage."""
        return (
            type(tensor) is self.type and tensor.data_ptr() == self.at and not _expired(self.storage.cdata)
            and tensor.shape == self.shape and tensor.stride() == self.stride and tensor.dtype == self.dtype
        )  # fmt: skip

    def stands(self, tensor: Any) -> bool:
        """Whether nobody wrote into it either."""
        try:
            written = tensor._version != self.version
        except RuntimeError:  # made in inference mode
            written = self.version is not None
        return not written and self.lies(tensor)


class Key:
    """The same of a weight that is no tensor, or that lies elsewhere every time."""

    __slots__ = ("key",)

    def __init__(self, weight: FrozenWeight) -> None:
        self.key = weight.key

    def stands(self, weight: Any) -> bool:
        return self.key is not None and weight.key == self.key


def sight_of(weight: torch.Tensor | FrozenWeight) -> Sight | Key:
    """Sight of a tensor, or key of a frozen weight, as it is now."""
    return Sight(weight) if isinstance(weight, torch.Tensor) else Key(weight)


class NormOperands:
    """W [N, K], A [r, K], B [N, r] and the scaling of one norm. number: no other operands have it, ever."""

    def __init__(self, weight: torch.Tensor | FrozenWeight, A: torch.Tensor, B: torch.Tensor, scaling: float) -> None:
        self.weight, self.A, self.B, self.scaling = weight, A, B, scaling
        self._look_anew()

    def _look_anew(self) -> None:
        self.number = next(_NUMBERS)
        self._dense = dense_of(self.weight)
        """The weight as a tensor, where it is one."""
        self._epoch = self._steps = 0
        self._base: tuple[int, Sight | Key, torch.Tensor] | None = None
        """The epoch, the weight, and ||W||^2 by row."""

    def point(self, weight: torch.Tensor | FrozenWeight, A: torch.Tensor, B: torch.Tensor, scaling: float) -> Self:
        """These are the operands from now on; free where they are the same objects. For layers whose parameters may be
        replaced: call it before get()."""
        if weight is not self.weight or A is not self.A or B is not self.B:
            if weight is not self.weight:
                self._dense = dense_of(weight)
            self.weight, self.A, self.B = weight, A, B
            self.invalidate()
        self.scaling = scaling
        return self

    def is_of(self, weight: torch.Tensor | FrozenWeight, A: torch.Tensor, B: torch.Tensor, scaling: float) -> bool:
        """Whether these are the operands now."""
        return weight is self.weight and A is self.A and B is self.B and scaling == self.scaling

    def invalidate(self) -> None:
        """The next get() computes, also ||W||^2."""
        self._epoch += 1

    def _base_N(self) -> torch.Tensor:
        """||W||^2 by row."""
        known = self._base
        if known is None or known[0] != self._epoch or not known[1].stands(self._known_by()):
            known = self._base = (self._epoch, sight_of(self._known_by()), squared_row_norm(self._operands().weight))
        return known[2]

    def _known_by(self) -> torch.Tensor | FrozenWeight:
        """Key that tells whether the weight is what it was: the tensor, where it stays where it lies."""
        if self._dense is None or isinstance(self.weight, torch.Tensor):
            return self.weight
        return self._dense if self.weight.stays else self.weight

    def _operands(self) -> NormProblem:
        return NormProblem(self.weight if self._dense is None else self._dense, self.A, self.B, self.scaling)

    def _problem(self) -> NormProblem:
        """The operands, with ||W||^2 where it is of use."""
        problem = self._operands()
        return replace(problem, base_N=self._base_N()) if self._dense is None or takes_kernels(problem) else problem

    def _on_device(self) -> bool:
        """Whether the check of its data and the computation are kernels."""
        return takes_kernels(self._operands()) and self.A.is_contiguous() and self.B.is_contiguous()

    def _missing(self) -> str | None:
        """Text on the first operand that is not whole here; None where all are."""
        if not getattr(self.weight, "is_here", True):
            return "the codes of the weight are on several processes"
        for name, operand in (("A", self.A), ("B", self.B), ("weight", self._dense)):
            if operand is None:
                continue
            if type(operand) not in PLAIN:
                return f"{name} is a {type(operand).__name__}, not a torch.Tensor"
            if operand.numel() and not operand.untyped_storage().size():
                return f"the storage of {name} is freed"
            if operand.ndim != 2:
                return f"{name} is {list(operand.shape)}"
        codes = getattr(self.weight, "codes", None)
        if codes is not None and not codes.stored.untyped_storage().size():
            return "the storage of the weight's codes is freed"
        return None

    def _data(self) -> tuple[torch.Tensor, ...]:
        """Data that is compared on a CPU: A, B and 8 elements of each row of W."""
        weight = self._dense
        if weight is None:
            return self.A.detach(), self.B.detach()
        N, K = weight.shape
        starts = torch.arange(N).mul_(40503).remainder_(max(K // 8, 1)).mul_(8)
        cols = (starts[:, None] + torch.arange(min(8, K))).to(weight.device)
        return self.A.detach(), self.B.detach(), weight.detach().gather(1, cols)


class Seen:
    """Record of what the host saw of a handle: its operands, the scaling, and how often it was told of changes."""

    __slots__ = ("A", "B", "epoch", "scaling", "steps", "weight")

    def __init__(self, handle: NormOperands) -> None:
        self.A, self.B, self.weight = Sight(handle.A), Sight(handle.B), sight_of(handle._known_by())
        self.scaling, self.epoch, self.steps = handle.scaling, handle._epoch, handle._steps

    def stands(self, handle: NormOperands) -> bool:
        """Whether it sees the same now."""
        return (
            self.steps == handle._steps and self.epoch == handle._epoch and self.scaling == handle.scaling
            and self.A.stands(handle.A) and self.B.stands(handle.B) and self.weight.stands(handle._known_by())
        )  # fmt: skip

    def follows(self, handle: NormOperands) -> bool:
        """Whether at most the elements of A and B are others; if so, it is what the host sees now."""
        A, B = handle.A, handle.B
        if not (
            self.epoch == handle._epoch and self.scaling == handle.scaling and self.A.lies(A) and self.B.lies(B)
            and self.weight.stands(handle._known_by())
        ):  # fmt: skip
            return False
        self.A.version, self.B.version, self.steps = version(A), version(B), handle._steps
        return True


class Check:
    """Modules whose data are checked and whose norms are computed on the device, in one batch.

    It serves while they are where they were. After a change of a frozen weight that the host sees, base_N is another tensor, at
    another address (the old one is held here), and the modules get another Check, which has seen nothing yet.
    """

    def __init__(self, handles: Sequence[NormOperands]) -> None:
        from packlora.ops.row_norm.triton_path import batch_of

        self.numbers = [handle.number for handle in handles]
        self.sights = [Seen(handle) for handle in handles]
        self.batch = batch_of([handle._problem() for handle in handles])
        device = handles[0].A.device
        self.seen = torch.zeros(len(handles), 5, dtype=torch.int64, device=device)
        self.kept = torch.empty(sum(self.batch.sizes), dtype=torch.float32, device=device)
        self.bases = [handle._base_N() for handle in handles]

    def norms(self) -> list[torch.Tensor]:
        """Norms of all of them, computed where the data changed."""
        with torch.inference_mode(False):  # they are saved for backwards
            return self.batch.split(self.batch.run(self.batch.stale(self.seen), self.kept))


@dataclass(slots=True)
class Together:
    """Checks of a window: the numbers of the handles in use, the checks on devices with the indices of their handles, and
    the indices of the others, which are looked at one by one when they are asked for."""

    numbers: list[int]
    checks: list[Check]
    checked: list[int]
    others: list[int]

    @classmethod
    def of(cls, handles: Sequence[NormOperands]) -> Together:
        ready = [index for index, handle in enumerate(handles) if handle._missing() is None and handle._on_device()]
        checks, checked = [], []
        if ready:
            from packlora.ops.row_norm.tables import batches

            for found in batches([handles[index]._problem() for index in ready]):
                checked += [ready[at] for at in found]
                checks.append(Check([handles[ready[at]] for at in found]))
        others = sorted({*range(len(handles))} - {*ready})
        return cls([handle.number for handle in handles], checks, checked, others)

    def fits(self, handles: Sequence[NormOperands]) -> bool:
        """Whether the elements of A's and B's are all that may have changed; it is up to date then."""
        if self.numbers != [handle.number for handle in handles]:
            return False
        sights = itertools.chain.from_iterable(check.sights for check in self.checks)
        if not all(seen.follows(handles[index]) for index, seen in zip(self.checked, sights, strict=True)):
            return False
        others = (handles[index] for index in self.others)
        return not any(
            handle._dense is not None and handle._missing() is None and handle._on_device() for handle in others
        )
