"""Cost of a plan before anything is measured: exact FLOPs, bytes moved, and a roofline estimate of the time.

A plan is laid out as its steps, forward and backward. FLOPs count multiply and add (2 T K N for a product) of the matrix
products only; each step reads its operands and writes its result once. The tokens of a batch with several adapters count as
shared out evenly among them; tokens without an adapter are one more share.

Shapes: T tokens, t tokens of one adapter, K inputs, N outputs, r rank, R ranks of one adapter over the layers of the group.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from packlora.ops import gpu
from packlora.ops.lora_linear.plan import Plan, ordered
from packlora.plans.case import Case

Phase = Literal["forward", "backward"]

DROPOUT_BYTES, DROPOUT_LAUNCHES = 60, 16
"""Bytes and launches of ops.dropout on a CPU, beside its scaling and masking of x: integer operations, each a pass over int32
[T, K / 2]. On a GPU dropout is one kernel that reads x and writes xd."""
WASTE = {"pass": 1.2, "joint": -0.15, "skinny": 1.6, "down": 1.6, "up": 1.4, "one-pass": 1.75, "inputs": 1.45}
"""Ratio of a step's time to the time of its memory traffic, on an H200 at 4096 x 4096, rank 16, T = 8192: library products with
a small dimension, and the kernels. joint: what is added to one-pass where it makes e as well, whose three tensors stream better
than one."""
WASTE_RANK = {"down": 0.010, "up": 0.03, "one-pass": 0.08, "inputs": 0.014}
"""Increase of WASTE for each rank past 16 (at rank 64 down, up and inputs took 37, 50 and 69 us; one-pass 34 at rank 16 and 59
at rank 32, the two library products in its place 45 at any rank)."""
SKINNY = 256
TILE = 128
"""Tokens of a tile of a fused kernel (kernels/sizes.py, FUSED_M)."""
TRITON_GEMM = {"forward": 1.022, "backward": 1.040}
"""A fused GEMM's time over cuBLAS: geometric mean of five shapes on an H200 at rank 16, T = 8192; the backward with dropout."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel or a few of the same kind. `slower`: factor on its arithmetic over the library's product. `waste`: factor on
    the time of its traffic."""

    phase: Phase
    name: str
    flops: int
    bytes: int
    launches: int = 1
    slower: float = 1.0
    waste: float = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Sustained FLOP/s and bytes/s of a device for one dtype, and the seconds that each launch adds."""

    flops: float
    bandwidth: float
    launch: float


def flops(plan: Plan, case: Case) -> int:
    """FLOPs of forward and backward."""
    return sum(step.flops for step in steps(plan, case))


def s_bytes(plan: Plan, case: Case) -> int:
    """Bytes of S [T, R] that are kept for the backward; 0 where S is not kept. R is the largest of several adapters."""
    keeps = plan.keep_s and plan.up != "merged" and plan.dB == "S"
    return case.tokens * max((sum(by_layer) for by_layer in case.ranks), default=0) * case.torch_dtype.itemsize * keeps


def seconds(plan: Plan, case: Case, machine: Machine) -> float:
    """Roofline estimate of forward and backward: each step takes the longer of its arithmetic and its traffic, and its
    launches. On a GPU launches cost the host, which runs ahead: the longer of the two counts. Calls whose segments move are
    recorded as CUDA graphs, whose launches cost the host nothing.
    """
    own = steps(plan, case)
    work = 0.0
    for step in own:
        sides = step.flops * step.slower / machine.flops, step.bytes * step.waste / machine.bandwidth
        work += max(sides) + HIDDEN * min(sides)
    launches = machine.launch * sum(step.launches for step in own)
    if case.device == "cpu":
        return work + launches
    work += GAP * sum(step.launches for step in own)
    return work if case.moving else max(work, 2 * HOST + launches) + BEHIND * work


def steps(plan: Plan, case: Case) -> tuple[Step, ...]:
    """Steps that the plan runs for the case, forward first."""
    shapes = _Shapes.of(case)
    plan = ordered(plan, shapes.e)
    return (*_forward(plan, shapes), *_backward(plan, shapes))


@dataclass(frozen=True, slots=True)
class _Shapes:
    """A case in numbers: e bytes of an element, `tokens` of each adapter, R_a ranks of each adapter over all layers,
    rounds_first whether products are rounded before they are added to anything."""

    case: Case
    e: int
    tokens: tuple[int, ...]
    R_a: tuple[int, ...]
    rounds_first: bool

    @staticmethod
    def of(case: Case) -> _Shapes:
        shares = max(len(case.ranks) + (not case.covered), 1)
        part, rest = divmod(case.tokens, shares)
        tokens = tuple(part + (number < rest) for number in range(len(case.ranks)))
        R_a = tuple(sum(by_layer) for by_layer in case.ranks)
        return _Shapes(case, case.torch_dtype.itemsize, tokens, R_a, case.target.rounds_first)

    def adapters(self) -> Iterator[tuple[int, int, bool]]:
        """(t, R, has dropout) of each."""
        return zip(self.tokens, self.R_a, self.case.drops, strict=True)

    def on_layer(self, layer: int) -> list[tuple[int, int]]:
        """(t, r) of each adapter that targets the layer."""
        return [(t, ranks[layer]) for t, ranks in zip(self.tokens, self.case.ranks, strict=True) if ranks[layer]]

    def mm(self, phase: Phase, name: str, m: int, k: int, n: int, extra: int = 0) -> Step:
        """[m, k] @ [k, n]; `extra` elements are read or written beside operands and result."""
        waste = WASTE["skinny"] if self.case.device == "cuda" and min(m, k, n) < SKINNY else 1.0
        return Step(phase, name, 2 * m * k * n, self.e * (m * k + k * n + m * n + extra), waste=waste)

    def rows_of_tiles(self) -> int:
        """Rows that a fused kernel computes: each adapter's tokens fill tiles of their own."""
        alone = self.case.tokens - sum(self.tokens)
        return sum(-(-t // TILE) * TILE for t in (*self.tokens, alone)) if len(self.tokens) > 1 else self.case.tokens

    def drop(self, phase: Phase, t: int) -> Step:
        if self.case.device == "cuda" and self.case.dtype != "float64" and gpu.HAS_TRITON:
            return Step(phase, "dropout", 0, t * self.case.K * 2 * self.e)
        return Step(phase, "dropout", 0, t * self.case.K * (4 * self.e + DROPOUT_BYTES), DROPOUT_LAUNCHES)


def _waste(kernel: str, ranks: Iterable[int]) -> float:
    """Waste of a kernel averaged over adapters; each has as many tokens."""
    return WASTE[kernel] + WASTE_RANK[kernel] * statistics.fmean(max(0, rank - 16) for rank in ranks)


Part = tuple[int, int]
"""FLOPs and elements of a part of a kernel."""


def _low_rank(adapters: Iterable[tuple[int, int]], n: int) -> list[Part]:
    """Products [t, r] @ [r, n] for each (t, r), without their addends."""
    return [(2 * t * r * n, t * r + r * n) for t, r in adapters]


def _kernel(phase: Phase, name: str, parts: Iterable[Part], e: int, waste: float, launches: int = 1) -> Step:
    every = list(parts)
    return Step(phase, name, sum(f for f, _ in every), e * sum(n for _, n in every), launches, waste=waste)


def _fused(phase: Phase, name: str, m: int, k: int, n: int, low_rank: Iterable[Part], e: int) -> Step:
    """[m, k] @ [k, n] with low-rank products in the same kernel."""
    made = _kernel(phase, name, [(2 * m * k * n, m * k + k * n + m * n), *low_rank], e, 1.0)
    return replace(made, slower=TRITON_GEMM[phase])


def _down(plan: Plan, s: _Shapes, phase: Phase) -> Iterator[Step]:
    """S of every adapter: the A's of a group's layers are stacked, x is read once."""
    K = s.case.K
    if plan.down == "routed":
        yield _kernel(phase, "S = xd A'", ((2 * t * K * R, t * K + R * K + t * R) for t, R, _ in s.adapters()), s.e,
                      _waste("down", s.R_a))  # fmt: skip
        return
    for t, R, drops in s.adapters():
        if drops:
            yield s.drop(phase, t)
        yield s.mm(phase, "S = xd A'", t, K, R)


def _forward(plan: Plan, s: _Shapes) -> Iterator[Step]:
    T, K = s.case.tokens, s.case.K
    if plan.up != "merged" and s.case.ranks:
        yield from _down(plan, s, "forward")
    for layer, N in enumerate(s.case.Ns):
        adapters = s.on_layer(layer)
        if not adapters:
            yield s.mm("forward", "y = x W'", T, K, N)
        elif plan.up == "merged":
            yield s.mm("forward", "W + s B A", N, adapters[0][1], K, extra=N * K)
            yield s.mm("forward", "y = x (W + s B A)'", T, K, N)
        elif plan.up == "fused":
            yield _fused("forward", "y = x W' + s S B'", s.rows_of_tiles(), K, N, _low_rank(adapters, N), s.e)
            if s.case.composed:  # z is kept beside y
                yield Step("forward", "z", 0, s.e * T * N, 0)
        elif plan.up == "epilogue":
            yield s.mm("forward", "y = x W'", T, K, N)
            low_rank = [*_low_rank(adapters, N), (0, (3 if s.case.composed else 2) * T * N)]
            yield _kernel("forward", "y = g (y + s S B') + bias", low_rank, s.e, _waste("up", (r for _, r in adapters)))
        elif plan.up == "routed":
            wide = s.rounds_first and not s.case.composed
            low_rank = [*_low_rank(adapters, N), (0, (2 if wide else 1) * T * N)]
            yield _kernel("forward", "y = s S B'", low_rank, s.e, _waste("up", (r for _, r in adapters)))
            yield s.mm("forward", "y += x W'", T, K, N, extra=(3 if wide else 1) * T * N)
            if wide:
                yield Step("forward", "y in 16 bits", 0, s.e * 3 * T * N, waste=WASTE["pass"])
        else:
            before = plan.up == "before"
            wide = before and s.rounds_first and not s.case.composed  # float32 has twice as many bytes
            name = "y = s S B'" if before else "y += s S B'"
            products = [s.mm("forward", name, t, r, N, extra=t * N if wide or not before else 0) for t, r in adapters]
            extra = 3 * T * N if wide else T * N if before else 0
            base = s.mm("forward", "y += x W'" if before else "y = x W'", T, K, N, extra=extra)
            yield from (*products, base) if before else (base, *products)
            if wide:
                yield Step("forward", "y in 16 bits", 0, s.e * 3 * T * N, waste=WASTE["pass"])
        if dropped := _of_dropped("forward", s, N):
            yield from dropped
        elif adapters and s.case.composed and plan.up in ("after", "before", "routed"):
            yield Step("forward", "y = g z + bias", 0, s.e * 2 * T * N, waste=WASTE["pass"])


def _of_dropped(phase: Phase, s: _Shapes, N: int) -> list[Step]:
    """Base product of the dropped x, where DoRA scales that one."""
    T, K = s.case.tokens, s.case.K
    if not s.case.base_dropped:
        return []
    if phase == "backward":
        return [s.mm("backward", "dx += drop((g - 1) d W)", T, N, K, extra=2 * T * K)]
    added = Step("forward", "y += (g - 1) xd W' + g S B'", 0, s.e * 5 * T * N, waste=WASTE["pass"])
    return [s.mm("forward", "xd W'", T, K, N), added]


def _backward(plan: Plan, s: _Shapes) -> Iterator[Step]:
    yield from _dropped_again(plan, s)
    for layer in range(len(s.case.Ns)):
        yield from _products_of_d(plan, s, layer)
    yield from _dA(plan, s)
    if s.case.needs[0]:
        yield from _dx(plan, s)


def _needs(plan: Plan, s: _Shapes) -> tuple[bool, bool, bool, bool]:
    """Whether dA and dB are needed, and whether each of them goes through d' xd."""
    _, need_A, need_B = s.case.needs if s.case.ranks else (False, False, False)
    return need_A, need_B, need_A and plan.dA == "xd", need_B and plan.dB == "xd"


def _dropped_again(plan: Plan, s: _Shapes) -> Iterator[Step]:
    """xd again, where a plain product reads it, and S again, where it was not kept."""
    need_A, need_B, A_via_xd, B_via_xd = _needs(plan, s)
    if plan.down != "routed" and need_B and not B_via_xd and not plan.keep_s:
        yield from _down(plan, s, "backward")
    elif A_via_xd or B_via_xd or (need_A and plan.dx not in ("routed", "fused")):
        yield from (s.drop("backward", t) for t, _, drops in s.adapters() if drops)


def _products_of_d(plan: Plan, s: _Shapes, layer: int) -> Iterator[Step]:
    """Steps that read the output gradient d of a layer, except dx: e = g d, dS, dB, and d' xd with the gradients computed from
    it."""
    T, K, N = s.case.tokens, s.case.K, s.case.Ns[layer]
    need_A, need_B, A_via_xd, B_via_xd = _needs(plan, s)
    adapters = s.on_layer(layer)
    need_dS = (need_A and not A_via_xd) or (s.case.needs[0] and plan.dx != "merged")
    composed = s.case.composed and bool(adapters)
    if plan.grad == "one-pass" and adapters:
        passes = 3 if composed else 1
        pair = ((4 * t * N * r, passes * t * N + 2 * (N * r + t * r)) for t, r in adapters)
        waste = _waste("one-pass", (r for _, r in adapters)) + (WASTE["joint"] if composed else 0.0)
        yield _kernel("backward", "dS = s e B, dB = e' S", pair, s.e, waste, launches=2 + composed)
    elif composed:
        yield Step("backward", "e = g d", 0, s.e * 3 * T * N, 2, waste=WASTE["pass"])
    for t, r in adapters:
        if need_dS and plan.grad == "mm":
            yield s.mm("backward", "dS = s d B", t, N, r)
        if need_B and not B_via_xd and plan.grad == "mm":
            yield s.mm("backward", "dB = s d' S", N, t, r)
        if A_via_xd or B_via_xd:
            yield s.mm("backward", "d' xd", N, t, K)
        if A_via_xd:
            yield s.mm("backward", "dA = s B' (d' xd)", r, N, K)
        if B_via_xd:
            yield s.mm("backward", "dB = s (d' xd) A'", N, K, r)


def _dA(plan: Plan, s: _Shapes) -> Iterator[Step]:
    """dA = dS' xd, and dropout'(dS A) where the same kernel makes it."""
    K = s.case.K
    need_A, _, A_via_xd, _ = _needs(plan, s)
    dx_too = s.case.needs[0] and plan.dx == "routed"
    by_kernel = plan.dx == "routed" or (plan.dx == "fused" and any(s.case.drops))
    if by_kernel and s.case.ranks and (dx_too or need_A):
        n = dx_too + need_A
        parts = ((n * 2 * t * R * K, n * (t * K + R * K + t * R)) for t, R, _ in s.adapters())
        name = ", ".join(["dx = dropout'(dS A)"] * dx_too + ["dA = dS' xd"] * need_A)
        yield _kernel("backward", name, parts, s.e, _waste("inputs", s.R_a), launches=1 + need_A)
    elif need_A and not A_via_xd:
        yield from (s.mm("backward", "dA = dS' xd", R, t, K) for t, R, _ in s.adapters())


def _dx(plan: Plan, s: _Shapes) -> Iterator[Step]:
    T, K = s.case.tokens, s.case.K
    written = plan.dx in ("before", "routed") and bool(s.case.ranks)  # onto which the base products accumulate
    if plan.dx == "before":
        yield from _low_rank_dx(s, written=True)
    for layer, N in enumerate(s.case.Ns):
        adapters = s.on_layer(layer)
        if plan.dx == "fused" and not written:
            low_rank = _low_rank(((t, R) for t, R, _ in s.adapters()), K)
            yield _fused("backward", "dx = d W + dropout'(dS A)", T, N, K, low_rank, s.e)
        else:
            if plan.dx == "merged" and adapters:
                yield s.mm("backward", "W + s B A", N, adapters[0][1], K, extra=N * K)
            yield s.mm("backward", "dx += d W" if written else "dx = d W", T, N, K, extra=T * K if written else 0)
        written = True
        yield from _of_dropped("backward", s, N)
    if plan.dx == "after":
        yield from _low_rank_dx(s, written=False)


def _low_rank_dx(s: _Shapes, written: bool) -> Iterator[Step]:
    """dropout'(dS A) of every adapter, written into dx or added to it."""
    K = s.case.K
    for t, R, drops in s.adapters():
        yield s.mm("backward", "dS A" if drops else "dx (+)= dS A", t, R, K, extra=0 if drops or written else t * K)
        if drops:
            yield s.drop("backward", t)
            yield Step("backward", "dx (+)= dropout'(dS A)", 0, s.e * (2 if written else 3) * t * K)


# --- devices -----------------------------------------------------------------------------------------------------------

_PER_CYCLE = {  # dense multiply-add FLOPs of one multiprocessor in a cycle, by compute capability: (16-bit, TF32, float32)
    (7, 0): (1024, 128, 128), (7, 5): (1024, 128, 128), (8, 0): (2048, 1024, 128), (8, 6): (1024, 512, 256),
    (8, 9): (1024, 512, 256), (9, 0): (4096, 2048, 256), (10, 0): (8192, 4096, 256), (12, 0): (1024, 512, 256),
}  # fmt: skip
REACHED = (0.75, 0.85)
"""Share of the peak arithmetic and bandwidth that large products and copies reach (H200: 770 of 989 TFLOP/s, 4.24 of 4.9)."""
GPU_LAUNCH, CPU_LAUNCH = 12e-6, 3e-6
HOST, GAP = 40e-6, 1.5e-6
"""Seconds of a forward or a backward on a GPU: HOST is the host's work beside launches, GAP the idle time of the GPU between
kernels."""
BEHIND = 1e-3
"""Share of the GPU's time that counts where the host takes longer: it decides between plans with as many launches. A call of
one adapter may be recorded, too, which is not known here."""
HIDDEN = 0.1
"""Share of the smaller of arithmetic and traffic that is not hidden behind the larger."""
CPU_PER_CYCLE = {"AVX512": 64, "AVX2": 32}
"""float32 FLOPs of a core in a cycle, by torch's name for the instructions; 8 for others."""
CPU_CLOCK, CPU_BANDWIDTH = 2.5e9, 10e9
"""Nominal: clock of a core, and bytes/s of the first core; the choice depends on their ratio alone."""


@lru_cache
def machine(device: torch.device, dtype: str, tf32: bool = False) -> Machine:
    """Roofline of a device, from what its driver says of it; nothing is measured.

    A GPU that is not in the table is taken for the newest one before it.
    """
    if device.type != "cuda":
        per_cycle = CPU_PER_CYCLE.get(torch.backends.cpu.get_cpu_capability(), 8)
        threads = torch.get_num_threads()
        width = getattr(torch, dtype).itemsize
        arithmetic = CPU_CLOCK * per_cycle * threads * min(1.0, 4 / width)
        return Machine(arithmetic, CPU_BANDWIDTH * min(threads, 8), CPU_LAUNCH)
    found = torch.cuda.get_device_properties(device)
    known = max((c for c in _PER_CYCLE if c <= (found.major, found.minor)), default=(7, 0))
    half, tf, single = _PER_CYCLE[known]
    per_cycle = half if dtype in ("float16", "bfloat16") else tf if tf32 else single
    if dtype == "float64":
        per_cycle = single // 2
    clock = 1e3 * getattr(found, "clock_rate", 0) or 1.7e9  # kHz
    memory = 1e3 * getattr(found, "memory_clock_rate", 0) * 2 * getattr(found, "memory_bus_width", 0) / 8
    peak = per_cycle * found.multi_processor_count * clock
    return Machine(peak * REACHED[0], (memory or 2e12) * REACHED[1], GPU_LAUNCH)
