"""Experts of a layer of which a process has some: which of an adapter's tensors are slices, and what goes in and comes out.

All processes of a group have the same tokens. Each computes what its own experts give, and the sum over the group is what the
layer gives; gradients of what all experts read, hidden states and the weights that routers give, are added up likewise. So what
is not on experts is computed alike on every process, with the same gradients, and of what is on experts each process has that
of its own: nothing of a gradient is a part of a sum.

Who sends is not this file's business: cut.py makes the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from packlora.experts.rows import Exchange, sent_to_experts
from packlora.ops.lora_experts.routing import Routing

Compute = Callable[[torch.Tensor, Routing, torch.Tensor | None], torch.Tensor]
"""What the experts here give for rows [R, D] by their routing and their dropout keys [R, 2]."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPart:
    """Experts [index * experts, (index + 1) * experts) of count * experts.

    enter: what hidden states and routing weights go through. leave: what the experts' sums by token go through. exchange: what
    takes rows to the experts and back, where not all processes have the same tokens. share: then, which of so many equal shares
    of its tokens this process sends, as others have the same ones; enter and leave are between these.
    """

    index: int
    count: int
    experts: int
    enter: Callable[[torch.Tensor], torch.Tensor]
    leave: Callable[[torch.Tensor], torch.Tensor]
    exchange: Exchange | None = None
    share: tuple[int, int] = (0, 1)
    of_experts: ClassVar[bool] = True
    """See Shard."""

    def __deepcopy__(self, memo: Any) -> ExpertPart:
        """Copies of a model have the same processes."""
        return self

    @property
    def first(self) -> int:
        return self.index * self.experts

    def sends(self, tokens: int) -> slice:
        """Slice of so many tokens that this process sends."""
        at, count = self.share
        return slice(tokens * at // count, tokens * (at + 1) // count)

    def placed(self, own_TD: torch.Tensor, tokens: int) -> torch.Tensor:
        """Place what came back for the tokens that were sent among zeros for the others."""
        own = self.sends(tokens)
        return own_TD if self.share[1] == 1 else torch.nn.functional.pad(own_TD, (0, 0, own.start, tokens - own.stop))

    @property
    def takes_rows(self) -> bool:
        """Whether rows of other processes come here."""
        return self.exchange is not None

    def sums(
        self, x_TD: torch.Tensor, chosen_Tk: torch.Tensor, weights_Tk: torch.Tensor, owned: Any, compute: Compute
    ) -> torch.Tensor:
        """Output of all experts for tokens, summed with the routers' weights [T, D]. Their rows go to the processes that have
        the experts, and come back. owned: owners of the tokens, see adapters/experts.py."""
        assert self.exchange is not None
        T, own = len(x_TD), self.sends(len(x_TD))
        sent = (x_TD, chosen_Tk, owned.owner, owned.count, owned.keys)
        arrived = sent_to_experts(self.exchange, self.first, self.count, self.experts, own, *sent)
        y_SD = arrived.back(arrived.routing.sum_to_tokens(compute(arrived.x, arrived.routing, arrived.keys)))
        y_SD = y_SD * weights_Tk[own].reshape(-1, 1)
        y_TD = y_SD.view(own.stop - own.start, chosen_Tk.shape[1], x_TD.shape[1]).sum(1).to(x_TD.dtype)
        return self.leave(self.placed(y_TD, T))

    def is_slice(self, name: str) -> bool:
        """Whether a tensor is a slice: a process has the tensors of its experts."""
        return True

    def is_part(self, name: str) -> bool:
        """No gradient is a part of a sum."""
        return False

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of an adapter's tensor of all experts, from that of those here."""
        dim = _dim(name)
        return tuple(size * self.count if at == dim else size for at, size in enumerate(shape))

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Select the experts here from a tensor of all experts."""
        by_expert = _by_expert(name, whole, self.experts * self.count)
        dim = by_expert.ndim - 1 if name == "B" else 0
        return by_expert.narrow(dim, self.first, self.experts).flatten(*_flat(name))

    def place(self, leaf: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """The experts here, the first dimension of each of the module's parameters."""
        return (slice(self.first, self.first + self.experts),)

    def joined(self, name: str, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor of all experts, from those of all processes in their order."""
        by_expert = [_by_expert(name, one, self.experts) for one in slices]
        return torch.cat(by_expert, -1 if name == "B" else 0).flatten(*_flat(name))


def _dim(name: str) -> int:
    """Dimension of the experts: A [E r, K], B [N, r E], magnitude [E, N]."""
    return 1 if name == "B" else 0


def _by_expert(name: str, tensor: torch.Tensor, experts: int) -> torch.Tensor:
    """[E, r, K], [N, r, E] or [E, N], a view."""
    if name == "B":
        return tensor.view(len(tensor), -1, experts)
    return tensor.view(experts, -1, tensor.shape[1])


def _flat(name: str) -> tuple[int, int]:
    """Dimensions of `_by_expert` that are one in an adapter's tensor."""
    return (1, 2) if name == "B" else (0, 1)
