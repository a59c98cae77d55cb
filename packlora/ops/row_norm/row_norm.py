"""Norms of the rows of W + s B A, DoRA's divisor, without anything of the size of W.

On a GPU with W in 16 bits (triton_path.py, any number of modules by the same six launches):

    w^2 = ||W||^2 + 2 s sum(B * (W A')) + s^2 sum((B G) * B),      G = A A'

by rows. Products run on tensor cores and add up in float32; where A has more bits than W it is split in two numbers of W's
type, so that nothing of A is rounded away. Rows in which the three terms cancel (w^2 under a quarter of what they add up to)
are computed anew, as the norm of their elements: their error is that of W + s B A in float32, not the root of it. In a graph
(torch.compile, CUDA graphs), where no table may be kept, all rows are, by one launch a module.

Everywhere else (torch_path.py): rows of W + s B A in chunks, in float32 (float64 where an operand is). As many operations as
the sum above, no cancellation; on a CPU up to twice as fast (2048 x 2048, r 384: 42 ms against 103 ms).

Scaling DoRA (arXiv 2603.22276) computes the same sum from float32 copies of W, at every forward. PEFT multiplies an identity
matrix by A and B.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from packlora.ops.gpu import why_no_kernels
from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.lora_linear.temporary import no_longer_than_this
from packlora.ops.row_norm import torch_path
from packlora.ops.row_norm.types import NormProblem
from packlora.ops.stamp import PLAIN


def squared_row_norm(weight: torch.Tensor | FrozenWeight, chunk_bytes: int | None = None) -> torch.Tensor:
    """||W||^2 by row, [N], float32 (float64 of float64); W [N, K] is read once and never copied as a whole."""
    N = weight.shape[0]
    out_N = torch.empty(N, dtype=torch_path.compute_dtype(weight.dtype), device=weight.device)
    with plainly(weight.device), no_longer_than_this():
        weight_NK = weight if (tensor := _tensor_of(weight)) is None else tensor
        if isinstance(weight_NK, torch.Tensor) and _has_kernels(weight_NK) and N:
            from packlora.ops.row_norm import triton_path

            triton_path.squared_row_norm(weight_NK, out_N)
        else:
            torch_path.squared_row_norm(weight_NK, out_N, chunk_bytes)
    return out_N


def row_norm(
    weight_NK: torch.Tensor | FrozenWeight, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float,
    base_N: torch.Tensor | None = None, budget_bytes: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """||W + s B A|| by row, [N], at least NORM_EPS; see row_norms."""
    return row_norms([NormProblem(weight_NK, A_rK, B_Nr, scaling, base_N)], budget_bytes)[0]


def row_norms(
    problems: Sequence[NormProblem], budget_bytes: int | None = None, in_graph: bool = False
) -> list[torch.Tensor]:
    """||W + s B A|| by row of every module, without gradient: float32, float64 where an operand is.

    Never rounded to W's dtype. Rows that are zero give NORM_EPS, rows with NaN give NaN. No host waits for a device.

    Args:
        problems: in any mixture of shapes, ranks, dtypes and devices.
        budget_bytes: of memory beside the operands; None takes CHUNK_BYTES or BUDGET_BYTES. One row, or for kernels one
            module, may need more.
        in_graph: the call is or may be part of a CUDA graph: what it allocates is the graph's memory, so nothing of it is kept,
            and nothing is copied from the host, as the tables of batches are.

    Raises:
        ValueError: shapes or devices of a problem do not fit; the message has its index.
    """
    problems = [_as_stored(problem) for problem in problems]
    for index, problem in enumerate(problems):
        problem.check(index)
    out: list[torch.Tensor | None] = [None] * len(problems)
    batched: list[int] = []
    for index, problem in enumerate(problems):
        has_kernels = takes_kernels(problem)
        if has_kernels and not in_graph:
            batched.append(index)
            continue
        with plainly(problem.weight.device):
            if has_kernels:
                from packlora.ops.row_norm import triton_path

                out[index] = triton_path.direct(problem)
            elif isinstance(problem.weight, torch.Tensor):
                out[index] = torch_path.row_norm(problem, budget_bytes)
            else:
                out[index] = _of_stored(problem, problem.weight, budget_bytes, in_graph)
    if batched:
        from packlora.ops.row_norm import triton_path

        with plainly(problems[batched[0]].weight.device):
            norms = triton_path.run([problems[i] for i in batched], budget_bytes)
            for index, norm_N in zip(batched, norms, strict=True):
                out[index] = norm_N
    return [norm_N for norm_N in out if norm_N is not None]


def takes_kernels(problem: NormProblem) -> bool:
    """Whether the kernels compute it: W in 16 bits with rows that lie together, on a GPU that has the kernels."""
    weight, A, B = problem.weight, problem.A, problem.B
    return isinstance(weight, torch.Tensor) and type(weight) in PLAIN and _fit(
        weight.device, (weight.dtype, A.dtype, B.dtype), (*weight.shape, A.shape[0]), weight.stride(1), problem.scaling
    )  # fmt: skip


def _fit(
    device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...], step: int, scaling: float
) -> bool:
    """takes_kernels of a plain W with A and B. dtypes: of all three. sizes: N, K, r. step: between elements of a row of W."""
    weight, *factors = dtypes
    return (
        _readable(device, weight, step) and 0 not in sizes and scaling != 0 and KERNEL_DTYPES.issuperset(factors)
        and (sizes[1] >= NARROW or KERNELS_ON_CPU)
    )  # fmt: skip


KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
NARROW = 128
"""Columns under which the kernels are not used: of float32 operands, split in two, each product loses 2^-18, and norms of fewer
columns can miss float32's error by that (benchmarks/LOG.md)."""
KERNELS_ON_CPU = False
"""Whether the kernels also run on the CPU, in Triton's interpreter; tests set it."""


def _has_kernels(weight: torch.Tensor) -> bool:
    return type(weight) in PLAIN and _readable(weight.device, weight.dtype, weight.stride(1))


def _readable(device: torch.device, dtype: torch.dtype, step: int) -> bool:
    return (
        dtype.itemsize == 2 and step == 1 and dtype.is_floating_point
        and (_capable(device) or (KERNELS_ON_CPU and device.type != "cuda"))
    )  # fmt: skip


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is None and why_no_kernels(device) is None


def _as_stored(problem: NormProblem) -> NormProblem:
    """Problem with its weight as a tensor where the weight is stored as one."""
    if isinstance(problem.weight, torch.Tensor) or (dense := problem.weight.dense()) is None:
        return problem
    return replace(problem, weight=dense)


def _tensor_of(weight: torch.Tensor | FrozenWeight) -> torch.Tensor | None:
    """W where it is one, or a temporary one, to be read at once."""
    return weight if isinstance(weight, torch.Tensor) else weight.tensor()


def _of_stored(problem: NormProblem, weight: FrozenWeight, budget_bytes: int | None, in_graph: bool) -> torch.Tensor:
    """Row norms of a weight that is not stored as a tensor. Kernels compute them from a temporary tensor of the weight where it
    can make one; otherwise rows are read chunk by chunk."""
    with no_longer_than_this():
        tensor = weight.tensor()
        if tensor is not None:
            return row_norms([replace(problem, weight=tensor)], budget_bytes, in_graph)[0]
    dtype = torch_path.compute_dtype(weight.dtype, problem.A.dtype, problem.B.dtype)
    norm_N = torch.empty(weight.shape[0], dtype=dtype, device=weight.device)
    for start, stop in torch_path.chunks(*weight.shape, dtype, weight.device, budget_bytes):
        base = None if problem.base_N is None else problem.base_N[start:stop]
        rows = torch_path.read_rows(weight, start, stop)
        own = NormProblem(rows, problem.A, problem.B[start:stop], problem.scaling, base)
        norm_N[start:stop] = row_norms([own], budget_bytes, in_graph)[0]
    return norm_N


@contextlib.contextmanager
def plainly(device: torch.device) -> Any:
    """Context without gradients, autocast or inference mode: autograd can save its tensors afterwards even if inference mode is
    on outside."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def traced_row_norm(
    weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float
) -> torch.Tensor:  # fmt: skip
    """||W + s B A|| by row, [N], without gradient, for torch.compile to trace: computed at every call, since what is kept in
    Python would be frozen into CUDA graphs, and would lie in their memory."""
    dtypes, sizes = (weight_NK.dtype, A_rK.dtype, B_Nr.dtype), (*weight_NK.shape, A_rK.shape[0])
    operands = weight_NK.detach(), A_rK.detach(), B_Nr.detach()
    norm_N: torch.Tensor
    known = (
        1.0 if scaling != 0 else 0.0
    )  # one that is set again is symbolic to Dynamo, which asks constants of constants alone
    if _traced_to_the_kernel(weight_NK.device, dtypes, sizes, weight_NK.stride(1), known):
        norm_N = torch.ops.packlora.direct_row_norm(*operands, scaling)
    else:
        norm_N = torch.ops.packlora.row_norm(*operands, scaling)
    return norm_N


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_to_the_kernel(
    device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...], step: int, scaling: float
) -> bool:  # fmt: skip
    """Whether the compiler launches the kernel itself: 3 launches and 100 us of the host less than by an operator that is
    closed to it. Triton's interpreter cannot be compiled."""
    if device.type != "cuda" or not _fit(device, dtypes, sizes, step, scaling):
        return False
    from packlora.ops.row_norm import triton_path

    return triton_path.compiles()


@torch.library.custom_op("packlora::row_norm", mutates_args=())
def row_norm_op(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """traced_row_norm in a way that is closed to compilers."""
    return row_norms([NormProblem(weight_NK, A_rK, B_Nr, scaling)], in_graph=True)[0]


@row_norm_op.register_fake
def _(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    return weight_NK.new_empty(
        weight_NK.shape[0], dtype=torch_path.compute_dtype(weight_NK.dtype, A_rK.dtype, B_Nr.dtype)
    )
