"""Measuring the kernels' sizes on a device: each kernel alone, its candidates in turn inside one loop, on usual shapes.

The GPU waits until the host has launched a run, so that the GPU alone is timed. A candidate whose results differ from those of
the usual sizes by more than rounding is left out, like one that does not run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from packlora.ops.dropout.keys import token_keys
from packlora.ops.gpu import on_device
from packlora.ops.lora_linear.call import Grads
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.kernels.config import Sizes, use, usual
from packlora.ops.lora_linear.plan import ROUTED
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.plans.kernel_sizes import Fields, KernelCache, Record, combined, described
from packlora.tune.candidates import KERNELS
from packlora.tune.timing import Contender, Work, geomean, paired

MARGIN = 0.02
"""Sizes are changed where that saves more than this, and no case takes so much longer."""
USUAL = described({})
DIFFERENCE = 2.0**-6
"""Relative Frobenius distance between results in bfloat16 beyond which they differ by more than rounding."""
COUNTED = (9, 40)
"""Fewest and most rounds of a case."""
BUDGET_S = 0.1
"""Seconds of the rounds of a case."""
FIRST_GUESS_S = 4.0
"""Estimated seconds of a candidate, mostly for compiling, until one was measured."""


@dataclass(frozen=True, slots=True)
class Step:
    """run: one run of a kernel. results: of a run, with 0 where nothing is written."""

    run: Callable[[], Any]
    results: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A call of one layer: T tokens, K inputs, N outputs; one adapter of each rank, with dropout."""

    T: int
    K: int
    N: int
    ranks: tuple[int, ...] = (16,)
    dora: bool = False


SEVERAL = (8, 16, 32, 64)
LARGE, FEW, WIDE, DEEP = (
    Shape(8192, 4096, 4096),
    Shape(2048, 4096, 4096),
    Shape(2048, 4096, 14336),
    Shape(8192, 14336, 4096),
)
SHAPES: dict[str, tuple[Shape, ...]] = {
    "down": (LARGE, DEEP, replace(LARGE, ranks=SEVERAL)),
    "few_down": (replace(DEEP, T=2048), replace(FEW, ranks=(32,))),
    "up": (LARGE, WIDE, replace(LARGE, ranks=SEVERAL)),
    "grad": (LARGE, WIDE, replace(LARGE, ranks=SEVERAL)),
    "several_grad": (replace(LARGE, ranks=SEVERAL), replace(WIDE, T=8192, ranks=SEVERAL)),
    "joint": (replace(LARGE, dora=True), replace(WIDE, dora=True, ranks=(32,))),
    "inputs": (replace(LARGE, ranks=(64,)), replace(FEW, ranks=(64,))),
    "narrow": (LARGE, FEW, DEEP),
}
"""Cases by kernel in which the kernel takes most of the time; the widest block of ranks, which needs the most memory, is among
them."""
Make = Callable[[str, Shape, Sizes], Step]


@dataclass(frozen=True, slots=True)
class Tuned:
    """Tuning result of a kernel. tried: number of candidates measured now; left: number not measured yet; error: reason why
    none could be measured, such as lack of memory."""

    name: str
    record: Record
    tried: int
    left: int
    error: str = ""


# --- what is run -------------------------------------------------------------------------------------------------------


def step_maker(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Make:
    """Kernels on random operands, which are the same for all candidates of a shape."""
    kept: dict[Shape, _Operands] = {}

    def make(name: str, shape: Shape, sizes: Sizes) -> Step:
        if shape not in kept:
            kept.clear()
            kept[shape] = _Operands(shape, device, dtype)
        return kept[shape].step(name, sizes)

    return make


class _Operands:
    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def randn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        T, K, N = shape.T, shape.K, shape.N
        adapters = {}
        for number, rank in enumerate(shape.ranks):
            A, B = (randn(*size, dtype=torch.float32).requires_grad_() for size in ((rank, K), (N, rank)))
            norm = torch.rand(N, generator=generator, device=device) + 1
            magnitude = (norm * 1.01).requires_grad_()
            adapters[number] = LowRank(A, B, 1.0, magnitude, norm) if shape.dora else LowRank(A, B, 1.0)
        bounds = np.linspace(0, T, len(shape.ranks) + 1).astype(int).tolist()
        rate = 0.0 if shape.dora else 0.1
        self.segments = tuple(Segment(n, bounds[n], bounds[n + 1], rate) for n in range(len(shape.ranks)))
        self.layers = (Layer(Dense(randn(N, K).div_(K**0.5)), None, adapters),)
        self.x_TK, self.d_TN = randn(T, K), randn(T, N)
        self.z_TN = randn(T, N) if shape.dora else None
        self.keys_T2 = torch.from_numpy(token_keys(0, 0, 0, T)).to(device)

    def step(self, name: str, sizes: Sizes) -> Step:
        """A run of the kernel with these sizes; the steps before it are done."""
        before = use(self.x_TK.device, sizes)
        try:
            prepared = GroupState(version_counted=True).prepared(self.x_TK, self.layers, ROUTED)
            prepared.refresh()
            call = prepared.call(self.x_TK, self.segments, 1, ROUTED)
        finally:
            use(self.x_TK.device, before)
        own, x, keys = prepared.operands, self.x_TK, self.keys_T2
        wanted, _ = call.wanted(True, (True,) * len(call.slots))

        def down() -> torch.Tensor:
            return call.down.down(call, own, x, keys, {})

        def written(S: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros_like(S, dtype=torch.bool)
            for segment in self.segments:
                mask[segment.rows, : call.layout.rows[segment.adapter][1]] = True
            return torch.where(mask, S, 0)

        if name in ("down", "few_down"):
            return Step(down, lambda: [written(down())])
        S = down()
        if name == "up":
            from packlora.ops.lora_linear.kernels import forward

            return Step(lambda: forward.up(call, own, S, 0), lambda: [forward.up(call, own, S, 0)[0]])

        def grads() -> Grads:
            return call.grads.grads(call, own, x, keys, S, [self.d_TN], [self.z_TN], wanted)

        def made() -> list[torch.Tensor]:
            found = grads()
            assert found.dS is not None
            sums = [one.dm for by_adapter in found.sums for one in by_adapter.values()]
            return [written(found.dS), *(tensor for tensor in (*found.dB, *sums) if tensor is not None)]

        if name in ("grad", "several_grad", "joint"):
            return Step(grads, made)
        dS = made()[0]

        def inputs() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            return call.inputs.inputs(call, own, x, keys, dS, [None], [None], wanted)

        return Step(inputs, lambda: [tensor for tensor in inputs() if tensor is not None])


# --- measuring ---------------------------------------------------------------------------------------------------------


def tune_kernels(device: torch.device, cache: KernelCache, seconds: float, make: Make | None = None) -> Iterator[Tuned]:
    """Measure what was not measured before, a kernel after the other, within so many seconds; each is remembered at once.

    Yields:
        Every kernel, also one for which there was no time.

    Raises:
        OSError: what was measured cannot be written.
    """
    make = make or step_maker(device)
    records, end, a_candidate = cache.known(), time.perf_counter() + seconds, FIRST_GUESS_S
    chosen = {name: record.fields for name, record in records.items()}
    for at, name in enumerate(KERNELS):
        known = records.get(name, Record({}, {}))
        base = combined({own: fields for own, fields in chosen.items() if own != name}, usual(device))
        new = [fields for fields in KERNELS[name] if described(fields) not in {**known.ratios, **known.failed}]
        began = time.perf_counter()
        count = min(len(new), int(max(0.0, end - began) / (len(KERNELS) - at) / a_candidate))
        if count:
            try:
                known = learnt(name, known, new[:count], base, device, make)
            except Exception as error:  # the usual sizes do not run: nothing is learnt of the others
                yield Tuned(name, known, 0, len(new), f"{type(error).__name__}: {error}"[:400])
                continue
            chosen[name] = known.fields
            a_candidate = (time.perf_counter() - began) / count
            cache.put({name: known})
        yield Tuned(name, known, count, len(new) - count)


def learnt(
    name: str, known: Record, candidates: Sequence[Fields], base: Sizes, device: torch.device, make: Make
) -> Record:  # fmt: skip
    """Record of a kernel after these candidates are measured as well. The best of many candidates is partly the luckiest: it is
    measured once more by itself, and the worse of its two times counts, until the best one has been measured twice."""
    ratios, failed = measured(name, candidates, base, device, make)
    ratios, failed, again = {**known.ratios, **ratios}, {**known.failed, **failed}, {USUAL, described(known.fields)}
    while (own := described((record := chosen_of(name, ratios, failed)).fields)) not in again:
        again.add(own)
        second, broken = measured(name, [record.fields], base, device, make)
        if own in broken:
            failed[own] = broken[own]
            del ratios[own]
        else:
            ratios[own] = max(ratios[own][0], second[own][0]), max(ratios[own][1], second[own][1])
    return record


def chosen_of(name: str, ratios: Mapping[str, tuple[float, float]], failed: Mapping[str, str]) -> Record:
    """The best of a kernel's candidates that have a time."""
    by_name = {described(fields): fields for fields in KERNELS[name]}
    good = {own: mean for own, (mean, worst) in ratios.items() if own in by_name and worst < 1 + MARGIN}
    best = min(good, key=good.__getitem__, default=USUAL)
    fields = by_name[best] if best != USUAL and good[best] < 1 - MARGIN else {}
    return Record(dict(fields), dict(ratios), dict(failed), datetime.now(UTC).isoformat(timespec="seconds"))


def measured(
    name: str, candidates: Sequence[Fields], base: Sizes, device: torch.device, make: Make
) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Time over that of the usual sizes by candidate: geometric mean over the kernel's shapes, and the worst; and what failed.

    Args:
        base: the sizes of the other kernels.

    Raises:
        Exception: whatever the usual sizes fail with.
    """
    by_name = {USUAL: base} | {described(fields): replace(base, **fields) for fields in candidates}  # type: ignore[arg-type]
    found: dict[str, list[float]] = {own: [] for own in by_name}
    failed: dict[str, str] = {}
    for shape in SHAPES[name]:
        taking_part = {own: sizes for own, sizes in by_name.items() if own not in failed}
        with on_device(device):
            want = _results(make(name, shape, base))
            contenders = [_contender(own, name, shape, sizes, make, want) for own, sizes in taking_part.items()]
            timings = paired(contenders, device, seconds=BUDGET_S, rounds=COUNTED, ahead=True)
        if (broken := timings.by_name[USUAL].error) is not None:
            raise RuntimeError(broken)
        kind = "ahead_ms" if device.type == "cuda" else "ms"
        for own in taking_part:
            ratio, error = timings.ratio(own, USUAL, kind), timings.by_name[own].error
            if ratio is None:
                failed[own] = str(error)
            else:
                found[own].append(ratio)
    out = {own: (geomean(ratios) or math.nan, max(ratios)) for own, ratios in found.items() if own not in failed}
    return {own: (round(mean, 4), round(worst, 4)) for own, (mean, worst) in out.items()}, failed


def _results(step: Step) -> list[torch.Tensor]:
    return [tensor.float() for tensor in step.results()]


def _contender(own: str, name: str, shape: Shape, sizes: Sizes, make: Make, want: list[torch.Tensor]) -> Contender:
    def build() -> Work:
        step = make(name, shape, sizes)
        for mine, theirs in zip(_results(step), want, strict=True):
            if not float((mine - theirs).norm()) <= DIFFERENCE * float(theirs.norm()):
                raise AssertionError("its results differ from those of the usual sizes by more than rounding")
        return Work(lambda: [step.run()].clear(), lambda: None)

    return Contender(own, build)
