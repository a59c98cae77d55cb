"""CUDA graphs of a run: whether the executor has them, and why it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from packlora.adapters.attach import is_linear
from packlora.adapters.spec import AdapterSpec
from packlora.base.mixers import mixing_functions
from packlora.base.model import Base
from packlora.config import Run
from packlora.engine.adapters import AdapterState
from packlora.engine.graphs import NO_GRAPHS, GraphedDevice
from packlora.engine.heads import has_head_loss
from packlora.engine.passes import Executor, SingleDevice
from packlora.engine.recorded import LEAST_TOKENS, Buffers
from packlora.errors import InputError

if TYPE_CHECKING:
    from packlora.runtime.job import Job


def graphed(
    run: Run, base: Base, single: Executor, jobs: Sequence[Job], budget: int, tell: Callable[[str], None]
) -> Executor:
    """The executor that a run asks for by `cuda_graphs`. budget: most tokens that microbatches are planned with.

    Raises:
        InputError: it must have graphs, and cannot.
    """
    reason = why_no_graphs(run, base, jobs)
    if run.cuda_graphs is True and reason is not None:
        raise InputError(f"cuda_graphs: true cannot be met: {reason}")
    if run.cuda_graphs is False:
        return single
    if reason is not None:
        if base.device.type == "cuda":
            base.warnings.append(f"{NO_GRAPHS}: {reason}")
        return single
    assert isinstance(single, SingleDevice)
    dropout = any(job.dropout_key is not None for job in jobs)
    buffers = buffers_of([job.state for job in jobs])
    return GraphedDevice(single, buffers, dropout, budget, tell, columns=columns_of(jobs), routes=route(jobs))


def buffers_of(states: Iterable[AdapterState]) -> Buffers:
    """Buffers in which the gradients of adapters are added up, see Gradients."""
    return {
        state.adapter.number: {name: (state.parameters[name], own) for name, own in state.gradient_buffers().items()}
        for state in states
    }


def columns_of(jobs: Sequence[Job]) -> dict[str, torch.dtype]:
    """Columns of tokens that jobs have, see Body."""
    terms = [term for job in jobs for term in job.learning.terms]
    return {name: own.dtype for term in terms for name, own in term.columns.items() if own.of == "token"}


def route(jobs: Sequence[Job]) -> bool:
    """Whether a job has a term that is computed from what routers give."""
    return any(term.carries for job in jobs for term in job.learning.terms)


def why_no_graphs(run: Run, base: Base, jobs: Sequence[Job]) -> str | None:
    """Reason against graphs that is known beforehand; None where microbatches are tried."""
    if (reason := why_base_has_none(run, base)) is not None:
        return reason
    if len(jobs) > LEAST_TOKENS:
        return f"{len(jobs)} jobs, more than {LEAST_TOKENS}"
    for job in jobs if len(jobs) > 1 else ():
        if has_two_products(job.adapter.spec):
            return f"job {job.name!r} is DoRA with dropout, whose two base products are made segment by segment"
    return None


def why_base_has_none(run: Run, base: Base) -> str | None:
    """Reason against graphs of a base model, whatever is trained on it."""
    if base.device.type != "cuda":
        return f"there are none on {base.device.type}"
    if base.form is not None and not base.form.by_launches:
        return f"the weights of quantised layers of {base.form.method} are made where they are read, by their library"
    if not base.storage.can_record:
        return "the base model is in parts on several processes, which exchange what they compute from the host"
    if run.dtype not in ("bfloat16", "float16"):
        return f"attention over samples whose boundaries are on the device is for bfloat16 and float16, not for {run.dtype}"
    if not base.fused_loss or not has_head_loss(base.model):
        return "the loss of this model needs more than the hidden states and the output layer"
    if mixing_functions(base.model):
        return "linear attention is computed sample by sample, of which each microbatch has others"
    if base.modality is not None:
        return "microbatches have images, which the host decodes and of which each has a size of its own"
    if run.offload_embedding:
        from packlora.base.host_embedding import why_host_waits

        if (reason := why_host_waits(base.model)) is not None:
            return reason
    return None


def has_two_products(spec: AdapterSpec) -> bool:
    """Whether an adapter is DoRA with dropout on base products of linear layers, which no kernel computes where owners move."""
    return any(own.scales_dropped for own in spec.modules.values() if is_linear(own))
