"""Replicas whose tokens go to one another's experts: `parallel: {expert: N, ep_implementation: all_to_all}`.

N replicas hold the experts of each layer together, each some of them, and all else each. Each has microbatches of its own.
Where a replica is cut (parallel/tensor.py), its processes have the same tokens and other experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.attach import Adapter
from packlora.adapters.flat import FlatLayout
from packlora.parallel.adapter import slice_of_parameter
from packlora.parallel.collectives import add_up
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh
from packlora.parallel.replicas import Replicas


class ExchangingReplicas(Replicas):
    """See Replicas. model: the processes that share out the experts, those of several replicas. alike: the processes with the
    same experts; None where it is one."""

    alike: dist.ProcessGroup | None = None

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        super().__init__(mesh, layout)
        self.saves = self.rank < layout.expert

    def _models(
        self, mesh: Mesh, layout: Layout, every: Sequence[int], replicas: Sequence[Sequence[int]]
    ) -> Sequence[dist.ProcessGroup | None]:
        """See Replicas."""
        n = layout.slices
        sets = [mesh.new_group(every[at : at + n]) for at in range(0, len(every), n)]
        for own in (every[at::n] for at in range(n) if len(sets) > 1):
            group = mesh.new_group(own)
            if mesh.rank in own:
                self.alike = group
        return [one for one in sets for _ in range(layout.expert)]

    def reached(self, owners: set[int], adapters: Iterable[int]) -> set[int]:
        """See Alone: all. Experts here compute tokens of other replicas, with the operands of all adapters, those without rows
        in a slot included."""
        return set(adapters)

    def whole(self, adapters: Sequence[Adapter]) -> Callable[[Adapter, Any], None]:
        """See Alone."""
        within = super().whole(adapters)

        def make(adapter: Adapter, state: Any) -> None:
            within(adapter, state)
            state.add_up = SharedGradient(adapter, self.alike).add_up

        return make


class SharedGradient:
    """Adds up the gradient of an adapter over replicas that hold experts together, once a step: parameters of experts over the
    replicas with the same experts, all others over all replicas.

    Args:
        adapter: on a model that `shard_experts` has cut.
        alike: the processes that have the same experts, None where it is one.
    """

    def __init__(self, adapter: Adapter, alike: dist.ProcessGroup | None) -> None:
        self.adapter, self.alike = adapter, alike
        on_experts = {
            name: own is not None and own.of_experts
            for name in adapter.layout.places
            for own in (slice_of_parameter(adapter, name),)
        }
        self._layouts = {
            own: FlatLayout(
                {name: place.shape for name, place in adapter.layout.places.items() if on_experts[name] == own}
            )
            for own in (False, True)
        }

    def add_up(self, gradient: torch.Tensor, add: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Add up in place. add: adds up tensors over all replicas."""
        self._added(False, gradient, lambda flat: add([flat]))
        if self.alike is not None:
            alike = self.alike
            self._added(True, gradient, lambda flat: add_up(flat, alike))

    def _added(self, of_experts: bool, gradient: torch.Tensor, add: Callable[[torch.Tensor], None]) -> None:
        layout, grads = self._layouts[of_experts], self.adapter.layout.views(gradient)
        if not layout.places:
            return
        flat = gradient.new_zeros(layout.size)
        views, own = list(layout.views(flat).values()), [grads[name] for name in layout.places]
        torch._foreach_copy_(views, own)
        add(flat)
        torch._foreach_copy_(own, views)
