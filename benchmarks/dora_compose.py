"""Part compose of `python -m benchmarks dora`: the paper's composition at its 20 shapes, and what each form loses near g = 1.

Shapes: base, lora and the upstream gradient [M, N], g [N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.options import Options, choose
from benchmarks.peers.compose import compose, near_unity_errors
from packlora.plans.timing import Contender, Timings, Work, geomean, paired
from packlora.runtime.memory import free_memory

SHAPES = [
    (1, 4096), (512, 4096), (2048, 4096), (4096, 4096), (2048, 8192), (8192, 8192), (16384, 8192), (32768, 8192), (1, 512),
    (512, 512), (2048, 512), (8192, 512), (2048, 1024), (2048, 2048), (2048, 3072), (2048, 6144), (2048, 12288),
    (2048, 16384), (2048, 28672), (8192, 28672),
]  # fmt: skip
"""Of the paper's own benchmark."""
LARGE = 2048 * 28672
"""Elements from which on a shape counts for the bandwidth that is quoted: no launch and no L2 in it."""
SCALING = 0.5
CONTENDERS = ["copy", "kernel", "kernel_both", "eager", "eager_both"]
MOVED = {"copy": 3, "kernel": 3, "kernel_both": 8, "eager": 3, "eager_both": 8}
"""Tensors [M, N] that must be read or written: forward 2 and 1; backward 3 (the gradient, base, lora) and 2."""
SPREADS = (1e-5, 1e-4, 5e-4, 1.5e-3, 5e-3, 2e-2, 1e-1)
PROTOCOL = (
    "compose: delta = (g - 1) base + g s lora on contiguous random bfloat16, s 0.5, g float32 in the kernel and bfloat16 in "
    "eager, as in the paper's benchmark; out of place. _both: with the backward from a dense random gradient, dg too. copy: "
    "torch's copy of as many bytes as the forward moves. bandwidth: bytes that must be moved per second; of_copy: its share of "
    "the copy's in the same loop. near-unity: largest absolute error of base + delta and of delta against float64 for "
    "g = 1 + spread * normal noise, base of unit variance, 2048 x 8192; see peers.compose.near_unity_errors for the forms."
)


@dataclass(frozen=True, slots=True)
class Case:
    M: int
    N: int

    @property
    def label(self) -> str:
        return f"compose {self.M}x{self.N}"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [Case(12, 40)]
    if options.quick:
        return [Case(2048, 4096), Case(8192, 8192)]
    return [Case(M, N) for M, N in SHAPES]


def contender(name: str, case: Case, device: torch.device) -> Contender:
    def make() -> Work:
        shape = (case.M, case.N)
        if name == "copy":  # half of the bytes are read, half written
            source = torch.randn(case.M * case.N * 3 // 2, device=device).bfloat16()
            target = torch.empty_like(source)

            def copy() -> None:
                target.copy_(source)

            return Work(copy, lambda: None)
        tier = "eager" if name.startswith("eager") or device.type == "cpu" else "kernel"
        both = name.endswith("_both")
        base, lora = (torch.randn(shape, device=device).bfloat16().requires_grad_(both) for _ in range(2))
        g = torch.rand(case.N, device=device) + 0.5
        g = (g.bfloat16() if tier == "eager" else g).requires_grad_(both)
        d = torch.randn(shape, device=device).bfloat16()
        assert d.is_contiguous() and 0 not in d.stride()
        call: Callable[[], torch.Tensor] = partial(compose, base, lora, g, SCALING, tier)  # type: ignore[arg-type]

        def step() -> None:
            out = call()
            if both:
                out.backward(d)

        def clear() -> None:
            base.grad = lora.grad = g.grad = None

        return Work(step, clear)

    return Contender(name, make)


def of_copy(timings: Timings, name: str) -> float | None:
    """Bandwidth of a contender over the copy's."""
    ratio = timings.ratio("copy", name)
    return None if ratio is None else ratio * MOVED[name] / MOVED["copy"]


def run(options: Options) -> list[dict[str, Any]]:
    """Measure; prints a line per case."""
    torch.manual_seed(0)
    names, chosen = choose(options.only, CONTENDERS, [], cases(options), always="copy")
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        contenders = [contender(name, case, options.device) for name in names]
        timings = paired(contenders, options.device, seconds=0.2, rounds=(15, 40), warmup=2)
        row: dict[str, Any] = {"part": "compose", "case": case.label, "M": case.M, "N": case.N, **timings.row()}
        del row["over_frozen"]  # there is no frozen layer in this loop
        moved = 2 * case.M * case.N
        row["bandwidth_gbs"] = {name: MOVED[name] * moved / ms / 1e6 for name, ms in row["ms"].items()}
        row["of_copy"] = {name: of_copy(timings, name) for name in row["ms"]}
        rows.append(row)
        shares = ((name, row["of_copy"][name] or 0.0) for name in row["ms"])
        print(f"{case.label}: " + ", ".join(f"{name} {share:.0%} of the copy's" for name, share in shares), flush=True)
        free_memory(options.device)
    return rows if options.only else rows + near_unity(options)


def near_unity(options: Options) -> list[dict[str, Any]]:
    """Errors by dtype and spread of g."""
    size = (64, 256) if options.tiny else (2048, 8192)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float16):
        for spread in SPREADS:
            name = str(dtype).removeprefix("torch.")
            errors = near_unity_errors(dtype, spread, size, options.device)
            row = {"part": "compose", "case": f"near-unity {name} {spread:g}", "dtype": name, "spread": spread}
            rows.append({**row, "errors": errors, "failed": {}})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the copy's bandwidth at the large shapes, geometric mean."""
    large = [row for row in rows if row.get("M", 0) * row.get("N", 0) >= LARGE]
    out: dict[str, Any] = {"compose_of_copy_bandwidth": geomean(row["of_copy"].get("kernel") for row in large)}
    out["compose_both_of_copy_bandwidth"] = geomean(row["of_copy"].get("kernel_both") for row in large)
    out["compose_eager_of_copy_bandwidth"] = geomean(row["of_copy"].get("eager") for row in large)
    for row in rows:
        if row.get("dtype") == "bfloat16" and row["spread"] == 1.5e-3:
            for form, errors in row["errors"].items():
                out[f"near_unity_{form}_output_error"] = errors["output"]
    return out


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of case, contender, us, share of the copy's bandwidth, peak MiB."""
    return [
        [
            row["case"], name, f"{1e3 * row['ms'][name]:.1f}", f"{row['of_copy'].get(name) or float('nan'):.2f}",
            f"{row['peak_mib'][name]:.1f}" if name in row["peak_mib"] else "-",
        ]
        for row in rows
        for name in row.get("ms", {})
    ]  # fmt: skip
