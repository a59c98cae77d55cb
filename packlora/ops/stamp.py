"""Stamps of tensors: the changes of a tensor that the host can see, which tell whether a result computed from it is still
valid.

Everything that this package prepares from parameters and keeps (packed copies, scales, norms, siblings' outputs) follows one
rule. A result is valid while the tensors are the same objects with the same stamps; where objects may be replaced, while they
are at the same addresses with the same versions. Writes that leave no trace on the host (through .data, or by a kernel) are
known only to the code that makes them. Each cache is therefore configured with `version_counted`: whether the version counts
all writes. Where it does not, the cache recomputes its results every time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

Stamps = list[tuple[int, int]] | None
plain_reads = torch._C.DisableTorchFunctionSubclass
"""Context in which attributes of tensors are read without asking their class, as bitsandbytes' parameters do: 2 us for each."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose data are where they say; others may be spread over devices."""


def stamp(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address of a tensor's data, and its version. None where the tensor counts no versions, as one made in inference mode:
    results that were computed from it are never reused."""
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def stamps(tensors: Iterable[torch.Tensor]) -> Stamps:
    """Stamps of several tensors; None where that of any one is None."""
    found = []
    for tensor in tensors:
        if (own := stamp(tensor)) is None:
            return None
        found.append(own)
    return found


def version(tensor: torch.Tensor) -> int | None:
    """Number of writes to the tensor by torch's operations; None where they are not counted."""
    return None if tensor.is_inference() else tensor._version


_UNCOUNTED = itertools.count(1 << 40)


def traced_version(tensor: torch.Tensor) -> int:
    """version() for torch.compile to trace: a constant of the graph, which counts writes since the graph began. Another number
    at every call where writes are not counted."""
    with torch.no_grad():
        return _VERSION_AS_LENGTH(tensor.detach()).shape[0]  # type: ignore[no-any-return]


@torch.library.custom_op("packlora::version_as_length", mutates_args=())
def _version_as_length(tensor: torch.Tensor) -> torch.Tensor:
    """Operator whose fake output has the tensor's version as its length, which is all that a graph reads. Compilers drop the
    operator itself, since its output is not used."""
    return tensor.new_empty(0)


@_version_as_length.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(next(_UNCOUNTED) if tensor.is_inference() else tensor._version)


_VERSION_AS_LENGTH = torch.ops.packlora.version_as_length
"""The operator as torch has it: of the Python object that defines it a compiler guards the parts."""
