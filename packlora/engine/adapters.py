"""State of one adapter in training: accumulators of gradients and losses, the optimizer, and values that can be put back.

A global batch is collected microbatch by microbatch; then a step is begun without waiting for the device, and accepted or put
back once its numbers are known.

Shapes: M metrics of the objective and its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from packlora.adapters.attach import Adapter
from packlora.adapters.flat import total_norm
from packlora.config import TrainConfig
from packlora.engine.memory import on_host
from packlora.engine.optimizer import optimizer_of
from packlora.ops.wide import wide_dtype, widened

if TYPE_CHECKING:
    from packlora.engine.loss_scale import LossScale

    AddUp = Callable[[Sequence[torch.Tensor]], None]
    """Adds up tensors in place, each over the replicas."""


class Held:
    """The elements of an adapter's `flat` that no step may change."""

    def __init__(self, adapter: Adapter) -> None:
        self._mask: torch.Tensor | None = None
        """Bool, like `flat`; None where there are none."""
        if parts := adapter.trained_parts:
            self._mask = torch.zeros_like(adapter.flat, dtype=torch.bool)
            views = adapter.layout.views(self._mask)
            for name, part in parts.items():
                views[name].fill_(True)
                views[name][part] = False

    def zero(self, gradient: torch.Tensor) -> None:
        """Zero the gradient of the held elements, which is in no norm."""
        if self._mask is not None:
            gradient.masked_fill_(self._mask, 0.0)

    def restore(self, flat: torch.Tensor, before: torch.Tensor) -> None:
        """Restore the held elements, which weight decay changes without a gradient."""
        if self._mask is not None:
            flat.copy_(torch.where(self._mask, before, flat))


class AdapterState:
    """State of an adapter that is trained.

    Args:
        train: settings of the optimizer, and max_grad_norm.
        num_sums: 1 + M.
        scale: dynamic loss scale, which float16 needs; None: losses are not scaled.
    """

    def __init__(self, adapter: Adapter, train: TrainConfig, num_sums: int, scale: LossScale | None = None) -> None:
        self.adapter, self.num_sums, self.scale = adapter, num_sums, scale
        self.max_grad_norm, self._wide = train.max_grad_norm, wide_dtype(adapter.flat.device)
        self.parameters = adapter.named_parameters()
        self.optimizer = optimizer_of(adapter, train)
        self._held = Held(adapter)
        self.gradient: torch.Tensor | None = None
        """Gradient of the present global batch, like adapter.flat; made by the first microbatch."""
        self.gradients: dict[str, torch.Tensor] = {}
        """Views of `gradient`, by parameter."""
        self.sums: torch.Tensor | None = None
        """Sums of the losses and metrics that ran here in the present global batch [1 + M], float64."""
        self.without = set(self.parameters)
        """Parameters without a gradient in the present global batch."""
        self.added: frozenset[str] = frozenset()
        """Parameters whose gradients were added to `gradient` by a microbatch that is not collected."""
        self.untrained = set(self.parameters)
        """Parameters that have never had a gradient."""
        self.untrained_elsewhere: set[str] = set()
        """Parameters of other processes that have never had a gradient."""
        self.found_elsewhere = 0
        """Number of parameters of other processes with a gradient in the global batch that is about to step."""
        self.last_good: torch.Tensor | None = None
        """adapter.flat of the step before the last: the newest values that are known to give a finite loss."""
        self.norm_of: Callable[[torch.Tensor], torch.Tensor] = total_norm
        """Norm of the whole gradient from `gradient`. Slices and parts of sums in that are added up in place."""
        self.add_up: Callable[[torch.Tensor, AddUp], None] = lambda gradient, add: add([gradient])
        """Adds up a gradient over the replicas in place, with what does so for tensors."""
        self.whole_of: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] = partial(_whole, adapter)
        """Whole tensors by parameter, copies on the CPU of one like adapter.flat, see memory.on_host. Where that holds slices,
        all processes that have some call it."""
        self.everywhere: Callable[[Mapping[str, int]], Mapping[str, int]] = dict
        """Numbers by parameter of all processes, from the numbers of the parameters here. Where processes have different
        parameters, all call it."""
        self._before: torch.Tensor | None = None
        """adapter.flat before the step that was begun; the gradient is divided by the loss scale since."""
        self._norm: torch.Tensor | None = None
        """Norm of the gradient of a step that was begun and has changed something."""
        self._is_torn = False
        """Whether that step has not changed everything yet."""
        self._is_counted = True

    @property
    def is_stepping(self) -> bool:
        """Whether a step has changed something that is neither accepted nor put back, or whoever counts steps has yet to hear
        of one that was accepted or taken back."""
        return self._norm is not None or not self._is_counted

    def count(self) -> None:
        """Whoever counts steps has heard of the last one."""
        self._is_counted = True

    @property
    def grad_scale(self) -> float:
        """Factor of the losses of the present global batch before a backward, by which its gradient is divided after it."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def has_gradient(self) -> bool:
        """Whether a parameter got a gradient in the present global batch, on whatever process."""
        return bool(self.found_elsewhere) or len(self.without) < len(self.parameters)

    # --- a global batch ----------------------------------------------------------------------------------------------------

    def gradient_buffers(self) -> dict[str, torch.Tensor]:
        """Views of `gradient` by parameter. Whoever adds to them in a backward says so by `added`."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.adapter.flat)
            self.gradients = self.adapter.layout.views(self.gradient)
        return self.gradients

    def no_sums(self) -> torch.Tensor:
        """Sums of losses and metrics of nothing [1 + M]."""
        return torch.zeros(self.num_sums, dtype=self._wide, device=self.adapter.flat.device)

    def collect(self, sums: torch.Tensor) -> None:
        """Add a microbatch's sums [1 + M] of this adapter to the global batch, and the gradients of its parameters, or nothing
        where memory runs out."""
        sums = sums if self.sums is None else self.sums + sums
        if self.added:
            self.without -= self.added
            self.added = frozenset()
        elif found := {name: p.grad for name, p in self.parameters.items() if p.grad is not None}:
            own = self.gradient_buffers()
            torch._foreach_add_([own[name] for name in found], list(found.values()))
            self.without.difference_update(found)
            self.drop_gradients()
        self.sums = sums

    def found(self, with_new: bool = False) -> dict[str, bool]:
        """Whether parameters have a gradient in the present global batch, by name. with_new: also one that is not collected."""
        return {
            name: name not in self.without or (with_new and (name in self.added or parameter.grad is not None))
            for name, parameter in self.parameters.items()
        }

    def drop_gradients(self) -> None:
        """Forget the gradients of parameters that were not collected."""
        self.added = frozenset()
        for parameter in self.parameters.values():
            parameter.grad = None

    def partial(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient like adapter.flat and the sums [1 + M] of what ran here, for replicas to add up."""
        self.gradient_buffers()
        assert self.gradient is not None
        if self.sums is None:
            self.sums = self.no_sums()
        return self.gradient, self.sums

    def close(self) -> None:
        """Forget the present global batch."""
        self.sums = None
        if self._norm is None:
            self._before = None
        if self.gradient is not None:
            self.without.update(self.parameters)
            self.gradient.zero_()

    def discard(self) -> None:
        """Forget the present global batch, and gradients that were not collected."""
        self.close()
        self.drop_gradients()

    def join_untrained(self) -> None:
        """Learn of the parameters elsewhere that have never had a gradient. All processes that have some call it."""
        self.untrained_elsewhere = set(self.everywhere(dict.fromkeys(self.untrained, 0))) - self.parameters.keys()

    # --- a step ------------------------------------------------------------------------------------------------------------

    def square(self) -> torch.Tensor:
        """Square of the norm of the gradient here, [] float64, of a complete global batch."""
        if self.gradient is None:
            return torch.zeros((), dtype=self._wide, device=self.adapter.flat.device)
        self._held.zero(self.gradient)
        return (widened(self.norm_of(self.gradient)) / self.grad_scale).square()

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Clip and step, without waiting for the device. `accept` or `put_back` follows; where memory runs out, the same call
        again, which does nothing twice, or `discard`.

        With a loss scale the norm is waited for: a gradient that is not finite changes neither parameters nor moments.

        Args:
            norm: [] of the gradient, where other processes have parts of it; None: `norm_of` gives it.

        Returns:
            [4] float64: the sum of the losses, the norm of the gradient, the largest parameter, and whether any parameter has
            changed.
        """
        assert self.sums is not None
        flat = self.adapter.flat
        if self._before is None:
            self._before = flat.clone()
            if self.gradient is not None and self.grad_scale != 1.0:
                self.gradient.div_(self.grad_scale)
        norm = self._change(lr, norm) if self._norm is None else self._norm
        if self._is_torn:
            raise torch.OutOfMemoryError("memory ran out in the middle of an optimizer step")
        self._held.restore(flat, self._before)
        largest, changed = torch.linalg.vector_norm(flat, math.inf), (flat != self._before).any()
        return torch.stack([widened(number) for number in (self.sums[0], norm, largest, changed)])

    def _change(self, lr: float, norm: torch.Tensor | None) -> torch.Tensor:
        """Make what a step needs, then clip and step, which on a GPU makes nothing. Returns the norm."""
        flat, gradient = self.adapter.flat, self.gradient
        if gradient is None or len(self.without) == len(self.parameters):
            self._norm = flat.new_zeros(()) if norm is None else norm.to(flat)
            return self._norm
        self._held.zero(gradient)
        norm = self.norm_of(gradient) if norm is None else norm.to(flat)
        factor = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm > 0 else None
        take = None
        if self.scale is None or math.isfinite(norm):
            take = self.optimizer.ready(gradient, self.without, lr)
        self._norm, self._is_torn = norm, True
        if factor is not None:
            gradient.mul_(factor)
        if take is not None:
            take()
        self._is_torn = False
        return norm

    def put_back(self) -> None:
        """Give the parameters the values before the step that was begun. Moments of the optimizer stay as the step made them:
        an adapter whose step was refused takes no more."""
        assert self._before is not None
        self.adapter.flat.copy_(self._before)
        self._before = self._norm = None

    def accept(self) -> None:
        """Keep the step that was begun; its global batch is over."""
        if self.scale is not None:
            self.scale.took()
        self._keep()
        self.untrained &= self.without

    def skip(self) -> None:
        """Lower the loss scale after a step that has changed nothing, since its gradient overflowed; its global batch is over.
        Its loss was finite, so the present values are good."""
        assert self.scale is not None
        self.scale.skipped()
        self._keep()

    def _keep(self) -> None:
        assert self._before is not None
        self._is_counted = False
        self.last_good, self._before, self._norm = self._before, None, None

    def revert(self) -> bool:
        """Go back to `last_good`. False where there is none."""
        if self.last_good is None:
            return False
        self._is_counted = False
        self.adapter.flat.copy_(self.last_good)
        return True


def _whole(adapter: Adapter, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Copies on the CPU, by parameter. No method of a state, which would refer to itself: then its memory, and its adapter's,
    would wait for Python's collector of cycles, on a GPU for hours."""
    return adapter.layout.views(on_host(flat))
