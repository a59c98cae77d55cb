"""Jobs whose adapters several processes have parts of: one norm of the gradient, whole tensors for what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from packlora.adapters.attach import Adapter
from packlora.parallel.replicas import Alone
from packlora.runtime.job import Job

if TYPE_CHECKING:
    from packlora.parallel.pipeline import Links


def holders(group: Alone) -> dist.ProcessGroup | None:
    """The processes that hold the layers of this one together with it; None where it holds them alone."""
    return group.model if group.stages == 1 else group.beside


def parts_of(adapters: Sequence[Adapter], group: Alone) -> Callable[[Job], None]:
    """Function that makes jobs of these adapters whole. All processes of the replica call it, before the adapters' values are
    read."""
    if group.processes == 1:
        return lambda job: None
    from packlora.parallel.adapter import WholeGradient, joined

    beside, across = holders(group), dict[str, Any]()
    if group.stages > 1:
        from packlora.parallel.stages import across_stages

        across = across_stages(adapters, cast("Links", group))

    def whole(job: Job) -> None:
        if beside is not None:
            job.state.norm_of = WholeGradient(job.adapter, beside, group.is_repeated).norm
            job.state.whole_of = partial(joined, job.adapter, beside)
        if (stages := across.get(job.name)) is not None:
            job.state.whole_of, job.state.everywhere = stages.whole, stages.everywhere

    return whole
