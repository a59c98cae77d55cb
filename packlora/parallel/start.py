"""Start of a run: on the one process that it is, or on those that torchrun started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from packlora.parallel.alone import TIMEOUT, OneProcess, was_restarted, world_size


@contextlib.contextmanager
def started(timeout: float = TIMEOUT, joining: float | None = None) -> Iterator[OneProcess]:
    """The mesh of the processes that torchrun started; a process group that is there already is used.

    Args:
        timeout: seconds after which a process that does not answer is given up.
        joining: seconds for which the others are waited for at the start; the same, unless it is given.

    Raises:
        ProcessError: not all processes came in time, or their address cannot be used.
    """
    if world_size() == 1:
        alone = OneProcess()
        alone.restarted = was_restarted()
        yield alone
        return
    from packlora.parallel.mesh import joined

    with joined(timeout, timeout if joining is None else joining) as mesh:
        yield mesh
