"""CUDA graphs of a service: a microbatch of any mix of its models is two replays, as those of a run are.

What is recorded holds all models that are on the base (seats.py). A recording takes as long as several microbatches without, so
the first ones of each size go without. Requests come in any number of tokens: sizes are few, and small ones cost little.
"""

from __future__ import annotations

from packlora.base.model import Base
from packlora.config import Run
from packlora.engine.graphs import NO_GRAPHS, GraphedDevice
from packlora.engine.passes import SingleDevice
from packlora.errors import InputError
from packlora.runtime.cuda_graphs import why_base_has_none
from packlora.serve.logs import LOG

PATIENCE = 2
"""Microbatches of a size that run without a graph before it is recorded."""
SIZES = 2
"""Numbers of tokens from a power of two to the next that have graphs of their own. Requests come together in any number, and
each size costs passes without a graph and a recording; tokens that pad a microbatch cost little while it is small."""

LENT = 2.5e13
"""Tokens of nobody, times parameters, for which a size runs by the graphs of a larger one before it has its own: a quarter to
half a second of a GPU. A pass without a graph and the recording take some 1.5 s of the host, in which nobody is served, but
what has come so often comes again."""


def graphs_of(run: Run, base: Base, single: SingleDevice) -> GraphedDevice | None:
    """The executor with graphs, of no model yet; None where there are none.

    Raises:
        InputError: the run must have graphs, and cannot.
    """
    reason = why_base_has_none(run, base)
    if run.cuda_graphs is True and reason is not None:
        raise InputError(f"cuda_graphs: true cannot be met: {reason}")
    if run.cuda_graphs is False or reason is not None:
        if reason is not None and base.device.type == "cuda":
            LOG.warning("%s: %s", NO_GRAPHS, reason)
        return None
    lent = int(LENT / sum(parameter.numel() for parameter in base.model.parameters()))
    return GraphedDevice(single, {}, False, 0, LOG.warning, patience=PATIENCE, steps=SIZES, lent=lent)
