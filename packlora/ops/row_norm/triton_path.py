"""Row norms by the kernels: batches of problems, their buffers and launches. Nothing here waits for the device.

Tables depend on shapes and addresses alone; both kinds are kept, so that from the second time on nothing is copied to the
device. Where nothing may be kept, `direct` does without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from packlora.ops.gpu import capability, has_copy_engine, on_device, processors
from packlora.ops.launcher import Descriptor, launch
from packlora.ops.recent import Recent
from packlora.ops.row_norm.kernels import fingerprint, norm, squares, wide
from packlora.ops.row_norm.kernels.common import COLUMNS
from packlora.ops.row_norm.reference import NORM_EPS
from packlora.ops.row_norm.tables import (
    FINGERPRINT,
    GRAM_K,
    GRAM_R,
    SIZES,
    TAIL_M,
    WIDE,
    WIDE_FOLD_R,
    WIDE_TAIL_M,
    WIDE_TAIL_R,
    Items,
    batches,
    cdiv,
    device_table,
    kind_of,
    make_items,
)
from packlora.ops.row_norm.types import NormProblem


def squared_row_norm(weight_NK: torch.Tensor, out: torch.Tensor) -> None:
    """||W||^2 by row into out, [N] float32; W in 16 bits, its rows contiguous."""
    N, K = weight_NK.shape
    with on_device(weight_NK.device):
        launch(
            squares.square_kernel, (cdiv(N, 4),), (weight_NK, out, N, K, weight_NK.stride(0)),
            BM=4, BK=1024, num_warps=4, num_stages=4,
        )  # fmt: skip


def direct(problem: NormProblem) -> torch.Tensor:
    """The norms of one module that row_norm.takes_kernels. No table is copied to the device and nothing is kept, for graphs
    allow neither."""
    weight, A, B = problem.weight, problem.A.contiguous(), problem.B.contiguous()
    assert isinstance(weight, torch.Tensor)
    grid, args, constants = _direct_launch(weight, A, B, float(problem.scaling))
    with on_device(weight.device):
        launch(norm.direct_kernel, grid, args, **constants)
    return _summed(args[3])


def _direct_launch(
    weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scaling: float
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments, the fourth of which is written, and constants of direct_kernel. K is cut in chunks until every processor
    has two programs."""
    (N, K), rank = weight.shape, len(A)
    ranks = 16 if rank <= 16 else 32
    rows, cols, warps, blocks = (128, 64, 8, 0) if rank > WIDE else (32, 128, 4, cdiv(rank, ranks))
    chunks = min(cdiv(2 * processors(weight.device), cdiv(N, rows)), cdiv(K, 4 * cols))
    chunk = cdiv(cdiv(K, chunks), cols) * cols
    squares = torch.empty(cdiv(K, chunk), N, dtype=torch.float32, device=weight.device)
    args = (weight, A, B, squares, N, K, rank, weight.stride(0), scaling, chunk)
    constants = {"BLOCKS": blocks, "BM": rows, "BR": ranks, "BK": cols, "num_warps": warps, "num_stages": 3}
    return (cdiv(N, rows), len(squares)), args, constants


def _summed(squares: torch.Tensor) -> torch.Tensor:
    return squares.sum(0).sqrt_().clamp_(min=NORM_EPS)


def compiles() -> bool:
    """Whether direct_op can be compiled: kernels are not interpreted."""
    return isinstance(norm.direct_kernel, JITFunction)


@torch.library.triton_op("packlora::direct_row_norm", mutates_args=())
def direct_op(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """`direct` as a compiler sees it, which launches the kernel itself and fuses the sum with what reads it."""
    grid, args, constants = _direct_launch(weight_NK, A_rK.contiguous(), B_Nr.contiguous(), scaling)
    torch.library.wrap_triton(norm.direct_kernel)[grid](*args, **constants)
    return _summed(args[3])


def run(problems: Sequence[NormProblem], budget_bytes: int | None) -> list[torch.Tensor]:
    """Norms of problems that row_norm.takes_kernels, in as few batches as kinds of operands and the budget allow."""
    ready = [prepared(problem) for problem in problems]
    if len(ready) == 1:
        batch = batch_of(ready)
        return batch.split(batch.run())
    out: list[torch.Tensor | None] = [None] * len(ready)
    for indices in batches(ready, budget_bytes):
        batch = batch_of([ready[index] for index in indices])
        for index, norm_N in zip(indices, batch.split(batch.run()), strict=True):
            out[index] = norm_N
    return [norm_N for norm_N in out if norm_N is not None]


def prepared(problem: NormProblem) -> NormProblem:
    """Problem with A, B and base_N in the layout that kernels read; the same object where nothing has to change."""
    A, B, base = problem.A, problem.B, problem.base_N
    if base is None:
        assert isinstance(problem.weight, torch.Tensor)
        base = torch.empty(len(problem.weight), dtype=torch.float32, device=problem.weight.device)
        squared_row_norm(problem.weight, base)
    if base is problem.base_N and A.is_contiguous() and B.is_contiguous() and base.is_contiguous():
        return problem
    return NormProblem(problem.weight, A.contiguous(), B.contiguous(), problem.scaling, base.float().contiguous())


_ITEMS: Recent[Items] = Recent(64)
_BATCHES: Recent[Batch] = Recent(64)


def batch_of(problems: Sequence[NormProblem]) -> Batch:
    """The batch of prepared problems of one kind; a Batch holds addresses, so the same addresses may share it."""
    return _BATCHES.get(addresses(problems), lambda: Batch(problems))


def addresses(problems: Sequence[NormProblem]) -> tuple[Any, ...]:
    """Key of everything that a Batch depends on."""
    out: list[Any] = [kind_of(problems[0])]
    for problem in problems:
        weight, base = problem.weight, problem.base_N
        assert isinstance(weight, torch.Tensor) and base is not None
        out += (
            weight.data_ptr(), weight.stride(0), problem.A.data_ptr(), problem.B.data_ptr(), base.data_ptr(),
            *weight.shape, len(problem.A), problem.scaling,
        )  # fmt: skip
    return tuple(out)


@dataclass(frozen=True, slots=True)
class At:
    """A matrix by its address, for tensor descriptors: a Batch holds no operands."""

    address: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, int]
    stride: int

    def data_ptr(self) -> int:
        return self.address

    def described(self, *block: int) -> Descriptor:
        base: Any = self
        if self.device.type == "cpu":  # the interpreter takes tensors alone
            length = (self.shape[0] - 1) * self.stride + self.shape[1]
            bytes_ = (ctypes.c_char * (length * self.dtype.itemsize)).from_address(self.address)
            base = torch.frombuffer(bytes_, dtype=self.dtype)
        return Descriptor(base, list(block), list(self.shape), [self.stride, 1])


class Batch:
    """Problems of one kind by their addresses: the caller that runs a batch must keep their operands alive.

    The columns of a problem's row in the table are those of row_norm/kernels/common.py.
    """

    def __init__(self, problems: Sequence[NormProblem]) -> None:
        kind = kind_of(problems[0])
        self.device, self.dtype, A_dtype, B_dtype, self.block, self.aligned, self.aligned_B = kind
        self.split_A = A_dtype != self.dtype
        self.sizes = [len(problem.B) for problem in problems]
        shapes = tuple((len(problem.B), problem.A.shape[1], len(problem.A)) for problem in problems)
        self.items = _ITEMS.get(
            (shapes, self.block, self.split_A, self.device, SIZES[self.block]),
            lambda: make_items(shapes, self.block, self.split_A, self.device),
        )
        table: list[int] = []
        for problem, (N, K, r), at in zip(problems, shapes, self.items.offsets, strict=True):
            weight, base = problem.weight, problem.base_N
            assert isinstance(weight, torch.Tensor) and base is not None
            table += (
                weight.data_ptr(), weight.stride(0), N, K, problem.A.data_ptr(), problem.B.data_ptr(), r, at["split"],
                at["rows"], at["gram"], at["Kp"], at["R"], at["inverses"], at["G"], at["parts"], base.data_ptr(),
            )  # fmt: skip
        assert len(table) == COLUMNS * len(problems)
        self.places = [
            (table[p], table[p + 1], table[p + 4], table[p + 2], table[p + 3], table[p + 6])
            for p in range(0, len(table), COLUMNS)
        ]
        """Address of W, stride of W, address of A, N, K and r of every problem."""
        self.described = self.block > WIDE and self.aligned and self.aligned_B and has_copy_engine(self.device)
        self.problems = device_table(table, torch.int64, self.device)
        self.scalings = device_table([problem.scaling for problem in problems], torch.float32, self.device)
        self.likes = [torch.empty(1, dtype=dtype, device=self.device) for dtype in (self.dtype, A_dtype, B_dtype)]
        self.launches: dict[Hashable, Any] = {}
        """Recorded launches, see launcher.py."""

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Norms by problem, out of those of all."""
        return list(flat.unsafe_split_with_sizes(self.sizes))  # views unknown to autograd: flat is not used again

    def stale(self, seen: torch.Tensor) -> torch.Tensor:
        """Flags of the problems, int32 [P]: 0 where A, B and the sampled elements of W (8 a row) are unchanged since the last
        call with the same `seen`, 1 where A or B changed, 3 where W changed and base_N is computed again.

        seen: int64 [P, 5], zeros for "never", brought up to date. 64 bits stand for a module's A and B: two states that
        differ are taken for the same once in 2^64.
        """
        tables, (W, A, B) = self.items.tables, self.likes
        parts = torch.empty(len(tables["bits"]), 2, dtype=torch.int64, device=self.device)
        out = torch.empty(len(self.sizes), dtype=torch.int32, device=self.device)
        with on_device(self.device):
            launch(
                fingerprint.fingerprint_kernel, (len(tables["bits"]),), (self.problems, tables["bits"], W, A, B, parts),
                launches=self.launches, key="fingerprint",
                ALIGNED=self.aligned, ALIGNED_B=self.aligned_B, BLOCK=FINGERPRINT, num_warps=8, num_stages=1,
            )  # fmt: skip
            launch(
                fingerprint.compare_kernel, (len(self.sizes),), (tables["ranges"], parts, seen, out),
                launches=self.launches, key=("compare", seen.data_ptr() % 16),
                BLOCK=256, num_warps=1, num_stages=1,
            )  # fmt: skip
            self._launch(
                squares.squares_kernel, "finish", out, (W,), "squares",
                ALIGNED=self.aligned, SPAN=SIZES[self.block].finish_m, BM=4, BK=1024, num_warps=4, num_stages=3,
            )  # fmt: skip
        return out

    def run(self, stale: torch.Tensor | None = None, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Norms of all problems, flat. With `stale` only of those it marks, the others come from `kept`, which is kept up."""
        W, A, B = self.likes
        size, gated = SIZES[self.block], stale is not None
        out, parts = self._buffer("rows"), self._buffer("parts")
        halves, inverses = A, self._buffer("inverses")
        with on_device(self.device):
            if self.split_A:
                halves = self._buffer("split", self.dtype)
                self._launch(
                    norm.split_kernel, "split", stale, (A, halves, inverses),
                    GATED=gated, ALIGNED=self.aligned, BK=1024, num_warps=4, num_stages=2,
                )  # fmt: skip
            if self.described:
                self._wide_cross(stale, halves, inverses, parts)
            else:
                self._launch(
                    norm.cross_kernel, "cross", stale, (W, halves, B, inverses, parts),
                    SPLIT=self.split_A, PROMOTE=size.promote, GATED=gated, ALIGNED=self.aligned, ALIGNED_B=self.aligned_B,
                    BM=size.m, BR=size.r, BK=size.k, num_warps=size.warps, num_stages=self._stages(size.stages),
                )  # fmt: skip
            if self.block > WIDE:
                self._wide_tail(stale, halves, inverses, parts)
            else:
                self._tail(stale, parts)
            self._launch(
                norm.finish_kernel, "finish", stale, (W, A, B, parts, self.scalings, kept, out),
                ("finish", None if kept is None else kept.data_ptr() % 16),
                EPS=NORM_EPS, GATED=gated, SLOTS=16, BM=size.finish_m, BR=16, BK=32, num_warps=4, num_stages=1,
            )  # fmt: skip
        return out

    def _wide_cross(
        self, stale: torch.Tensor | None, halves: torch.Tensor, inverses: torch.Tensor, parts: torch.Tensor
    ) -> None:
        size, B, gated = SIZES[self.block], self.likes[2], stale is not None
        for number, ((weight, W_stride, A, N, K, rank), at) in enumerate(
            zip(self.places, self.items.offsets, strict=True)
        ):
            W = At(weight, self.dtype, self.device, (N, K), W_stride)
            if self.split_A:
                first, size_A = halves.data_ptr() + 2 * at["split"], (at["R"], at["Kp"])
                hi = At(first, self.dtype, self.device, size_A, at["Kp"])
                lo = At(first + 2 * at["R"] * at["Kp"], self.dtype, self.device, size_A, at["Kp"])
            else:
                hi = lo = At(A, self.dtype, self.device, (rank, K), K)
            total = cdiv(N, size.m) * at["blocks"] * at["chunks"]
            launch(
                wide.wide_cross_kernel, (min(processors(self.device), total),),
                (
                    self.problems, number, stale, W.described(size.m, size.k), hi.described(size.r, size.k),
                    lo.described(size.r, size.k), B, inverses, parts, at["blocks"], at["chunks"], total,
                ),
                launches=self.launches, key=("wide_cross", gated, number),
                steps=at["steps"], SPLIT=self.split_A, GATED=gated, BM=size.m, BR=size.r, BK=size.k,
                PROGRAMS=min(processors(self.device), total), FLATTEN=not self.split_A, num_warps=size.warps,
                num_stages=3 if self.split_A or B.dtype == torch.float32 else 4,
            )  # fmt: skip

    def _tail(self, stale: torch.Tensor | None, parts: torch.Tensor) -> None:
        (_, A, B), gated = self.likes, stale is not None
        gram, G, BG = self._buffer("gram"), self._buffer("G"), min(GRAM_R, self.block)
        self._launch(
            norm.gram_kernel, "gram", stale, (A, gram),
            PRECISION="tf32x3" if A.dtype == torch.float32 else "ieee", GATED=gated, ALIGNED=self.aligned, BR=BG,
            BK=GRAM_K, num_warps=4, num_stages=3,
        )  # fmt: skip
        self._launch(norm.fold_kernel, "fold", stale, (gram, G), GATED=gated, BR=BG, num_warps=4, num_stages=2)
        self._launch(
            norm.tail_kernel, "tail", stale, (B, G, parts),
            GATED=gated, ALIGNED_B=self.aligned_B, BM=TAIL_M, BR=BG, num_warps=4, num_stages=2,
        )  # fmt: skip

    def _wide_tail(
        self, stale: torch.Tensor | None, halves: torch.Tensor, inverses: torch.Tensor, parts: torch.Tensor
    ) -> None:
        B, gated = self.likes[2], stale is not None
        gram, G = self._buffer("gram"), self._buffer("G")
        self._launch(
            wide.wide_gram_kernel, "gram", stale, (halves, inverses, gram),
            SPLIT=self.split_A, GATED=gated, ALIGNED=self.aligned, BR=self.block, BK=GRAM_K, num_warps=8,
            num_stages=self._stages(3),
        )  # fmt: skip
        self._launch(
            wide.wide_fold_kernel, "fold", stale, (gram, G),
            GATED=gated, BLOCK=self.block, BR=WIDE_FOLD_R, num_warps=4, num_stages=2,
        )  # fmt: skip
        self._launch(
            wide.wide_tail_kernel, "tail", stale, (B, G, parts),
            GATED=gated, ALIGNED_B=self.aligned_B, BM=WIDE_TAIL_M, BR=WIDE_TAIL_R, BK=32, num_warps=8, num_stages=3,
        )  # fmt: skip

    def _launch(
        self, kernel: Any, table: str, stale: torch.Tensor | None, args: tuple[Any, ...], key: Hashable = None,
        **constants: Any,
    ) -> None:  # fmt: skip
        """A kernel with a program for each row of a table. key: see launcher.launch; by default of the table and the gate, as a
        batch runs one kernel on each."""
        rows, key = self.items.tables[table], (table, stale is not None) if key is None else key
        own = self.problems, rows, stale, *args
        launch(kernel, (len(rows),), own, launches=self.launches, key=key, **constants)

    def _stages(self, stages: int) -> int:
        """Pipeline stages of kernels for ranks over WIDE: two where a program has less shared memory than on an A100 (cards of
        any generation), or where more of it is taken for sums (Blackwell)."""
        return stages if self.block <= WIDE or capability(self.device) in ((8, 0), (8, 7), (9, 0)) else min(stages, 2)

    def _buffer(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(self.items.lengths[name], dtype=dtype, device=self.device)
