"""Processes that hold a base model together, and errors that end all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

from packlora.errors import ProcessError, reason_of
from packlora.parallel.alone import TIMEOUT
from packlora.parallel.join import join
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh, take_gpu
from packlora.parallel.replicas import Replicas
from packlora.serve.ranks.meeting import SECONDS


class Ended(BaseException):
    """An error while all ranks computed. It is no Exception, since nobody can go on after it.

    Args:
        is_own: whether it is this process's; else another rank did not answer.
    """

    def __init__(self, reason: str, is_own: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_own = reason, is_own


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Mark work that all ranks do at the same time. Raises Ended where it fails."""
    try:
        yield
    except Exception as error:
        raise Ended(reason_of(error) or type(error).__name__, not isinstance(error, ProcessError)) from error


@contextlib.contextmanager
def processes(size: int) -> Iterator[Replicas]:
    """The processes that torchrun started, as one replica of the base model. All call it.

    Raises:
        InputError, ProcessError: see parallel.join.
    """
    take_gpu()
    is_joined = dist.is_initialized()
    if not is_joined:
        join(SECONDS, TIMEOUT)
    mesh = Mesh(dist.get_rank(), size, distributed_c10d._get_default_store(), TIMEOUT)
    try:
        yield Replicas(mesh, Layout((("serve",),), tensor=size))
        mesh.barrier()
        if not is_joined:
            dist.destroy_process_group()
    finally:
        mesh.close()
