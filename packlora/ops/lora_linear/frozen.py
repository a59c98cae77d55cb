"""Interface of a frozen weight W [N, K] to the operator; it hides how the weight is stored.

`Dense` lies in memory in the layout in which it is multiplied. The weights of codes/weight.py are codes, from which a tensor is
made where it is read; those of a model that devices share (parallel/sharded.py) are there only while their layer runs. A
further implementation of `FrozenWeight` needs no change of the operator: plans that read W as a tensor are not legal where
there is none (`has_tensor`). `FrozenLinear` is a layer with such a weight. storage.py describes how the weights of a
whole model are stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear

from packlora.ops.gpu import rounds_before_adding
from packlora.ops.stamp import stamps

EXACT: list[None] = []
"""Not empty inside of exact_products."""


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, no frozen weight rounds what it multiplies: for proofs, which compare two ways to compute the same numbers."""
    EXACT.append(None)
    try:
        yield
    finally:
        EXACT.pop()


class Factors(NamedTuple):
    """Operands of a base product that a fused kernel multiplies, x [T, K] and W [N, K], or d [T, N] and W. Codes have scales,
    float32, by row of x or d and by output of the product; their weight lies by outputs, [N, K] or [K, N]."""

    x: torch.Tensor
    weight: torch.Tensor
    x_scales: torch.Tensor | None = None
    weight_scales: torch.Tensor | None = None


class FrozenWeight(Protocol):
    """shape (N, K); dtype: of the products and of x; device.

    Two weights are equal where products by one are products by the other, whatever is written into them.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def key(self) -> Hashable:
        """Location and version of the weight: results that were computed from the weight stay valid while the key is unchanged.
        None where versions are not counted; then no result is kept."""

    def matmul(
        self,
        x_TK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        accumulate: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """accumulate + scale x W' + bias in x's dtype, [T, N].

        accumulate [T, N] is written over, in x's dtype or, with scale 1, in `accumulator_dtype(x)`. The bias comes last: beside
        a large one what is small in `accumulate` would be lost.
        """

    def matmul_t(self, d_TN: torch.Tensor, accumulate: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """accumulate + scale d W, [T, K], in d's dtype; accumulate is written over."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """W[start:stop] as a dense tensor [stop - start, K], which may be the weight's own memory."""

    def dense(self) -> torch.Tensor | None:
        """W [N, K] itself, where it lies in memory as a tensor."""

    @property
    def stays(self) -> bool:
        """Whether what `dense` gives lies in memory at one place all the time."""

    @property
    def has_tensor(self) -> bool:
        """Whether `tensor` gives one."""

    def tensor(self) -> torch.Tensor | None:
        """W [N, K] as a tensor, for kernels that read it and for merged weights. To be read before other weights are asked for
        theirs, and not to be kept: it may be a temporary one (temporary.py)."""

    def factors(self, x: torch.Tensor) -> Factors:
        """Operands that a fused kernel multiplies for x W', x [..., K]. Where there is a tensor alone; as temporary as it."""

    def factors_t(self, d: torch.Tensor) -> Factors:
        """The same for d W, d [..., N]."""

    @property
    def change(self) -> Any:
        """The weight's product of what dropout changes of DoRA (changes.ChangeProduct); None where it has none."""


class Products:
    """Products of a weight that `_made` dequantises to a tensor."""

    __slots__ = ()
    has_tensor = True
    stays = True
    change: Any = None

    def _made(self) -> torch.Tensor:
        raise NotImplementedError

    def tensor(self) -> torch.Tensor | None:
        return self._made()

    def matmul(
        self,
        x_TK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        accumulate: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        W_NK = self._made()
        if accumulate is None and scale == 1.0:
            return linear(x_TK, W_NK, bias_N)
        if accumulate is None:
            y_TN = torch.addmm(x_TK.new_empty(()), x_TK, W_NK.t(), beta=0, alpha=scale)
        elif accumulate.dtype == x_TK.dtype:
            y_TN = accumulate.addmm_(x_TK, W_NK.t(), alpha=scale)
        else:
            y_TN = torch.addmm(accumulate, x_TK, W_NK.t(), out_dtype=accumulate.dtype, out=accumulate)
        if bias_N is not None:
            y_TN.add_(bias_N)
        return y_TN if y_TN.dtype == x_TK.dtype else y_TN.to(x_TK.dtype)

    def matmul_t(self, d_TN: torch.Tensor, accumulate: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        W_NK = self._made()
        if accumulate is not None:
            return accumulate.addmm_(d_TN, W_NK, alpha=scale)
        return d_TN @ W_NK if scale == 1.0 else torch.addmm(d_TN.new_empty(()), d_TN, W_NK, beta=0, alpha=scale)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._made()[start:stop]

    def factors(self, x: torch.Tensor) -> Factors:
        return Factors(x, self._made())

    factors_t = factors


class Dense(Products):
    """A weight [N, K] in memory."""

    __slots__ = ("weight",)

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.weight = weight_NK

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def key(self) -> Hashable:
        found = stamps([self.weight])
        return None if found is None else (id(self.weight), *found[0])

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dense) and other.weight is self.weight)

    def __hash__(self) -> int:
        return id(self.weight)

    def dense(self) -> torch.Tensor:
        return self.weight

    _made = dense


class FrozenLinear(torch.nn.Linear):
    """A frozen linear layer whose parameter `weight` is not W [N, K] but what W is made of.

    frozen: W as the operator takes it, always the same object on a device.
    """

    frozen: FrozenWeight

    @property
    def settings(self) -> dict[str, Any]:
        """How W is made, for the files of adapters that are trained on it."""
        raise NotImplementedError

    def take(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """Keep of a weight of floats, on the layer's device, what is not shared by rows, and give what is: the parameter."""
        raise NotImplementedError


class InMemory:
    """The storage (storage.py) of a model that is whole on its device."""

    is_whole, can_record = True, True

    def each(self, paths: Iterable[str]) -> Iterator[str]:
        return iter(paths)

    def frozen(self, weight: torch.Tensor) -> FrozenWeight:
        return Dense(weight)

    def adapted(self, paths: Iterable[str]) -> None:
        pass

    def holds(self, path: str) -> bool:
        return True

    def idle(self, context: Any, backward: bool) -> None:
        pass


def accumulator_dtype(x_TK: torch.Tensor) -> torch.dtype:
    """Dtype that a low-rank part needs so that the base product is added to it without loss: float32 where the library rounds a
    16-bit product before it adds, otherwise the dtype of x."""
    return torch.float32 if x_TK.element_size() == 2 and rounds_before_adding(x_TK.device) else x_TK.dtype
