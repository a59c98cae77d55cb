"""What DoRA's norm costs: the kernels against the ways of others, one module at a time and all modules of a model at once.

    python -m packlora.bench.studies.row_norm_probe [--sweep] [--seconds 1.0]

JSON goes to $OUT/row_norm.json, or the current folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from packlora.adapters.norms import RowNorms
from packlora.ops.row_norm import tables, torch_path, triton_path
from packlora.ops.row_norm.row_norm import row_norm, row_norms, squared_row_norm
from packlora.ops.row_norm.types import NormProblem
from packlora.plans.timing import Contender, Work, paired

SHAPES = ((4096, 4096), (8192, 28672))
RANKS = (16, 64, 128, 384, 768)
MODEL = 32 * ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
"""N, K of the modules of an 8B model."""
SWEEP: dict[int, tuple[tables.Sizes, ...]] = {
    16: (
        tables.Sizes(64, 16, 128, 4, 4), tables.Sizes(64, 16, 256, 4, 3),
        tables.Sizes(128, 16, 128, 4, 3), tables.Sizes(64, 16, 128, 4, 3),
        tables.Sizes(128, 16, 64, 4, 4),
    ),
    384: (
        tables.Sizes(256, 128, 64, 8, 3, promote=False, most_k=384),
        tables.Sizes(256, 128, 64, 8, 3, promote=False, most_k=512),
        tables.Sizes(256, 128, 64, 8, 3, promote=False, most_k=256),
        tables.Sizes(256, 128, 64, 8, 2, promote=False, most_k=384),
        tables.Sizes(256, 128, 32, 8, 4, promote=False, most_k=384),
        tables.Sizes(128, 128, 64, 8, 3, promote=True),
        tables.Sizes(128, 128, 64, 8, 4, promote=True),
        tables.Sizes(128, 128, 128, 8, 2, promote=True),
        tables.Sizes(128, 128, 64, 8, 3, promote=False, most_k=512),
    ),
}  # fmt: skip


def draw(N: int, K: int, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    W = torch.randn(N, K, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    return W, torch.randn(r, K, device="cuda") * 0.02, torch.randn(N, r, device="cuda") * 0.02


def identity(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float, dtype: torch.dtype) -> torch.Tensor:
    """PEFT's way, adapters in `dtype`."""
    eye = torch.eye(W.shape[1], device="cuda", dtype=dtype)
    delta = (eye @ A.to(dtype).T @ B.to(dtype).T).T
    norm_N: torch.Tensor = torch.linalg.vector_norm(W.to(dtype) + s * delta, dim=1)
    return norm_N


def dense(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float, dtype: torch.dtype) -> torch.Tensor:
    norm_N: torch.Tensor = torch.linalg.vector_norm(W + s * (B.to(dtype) @ A.to(dtype)), dim=1)
    return norm_N


def factored(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float, base: torch.Tensor) -> torch.Tensor:
    """The sum of three terms in float32, by torch."""
    U, G = W.float() @ A.T, A @ A.T
    return (base + 2 * s * (B * U).sum(1) + s * s * ((B @ G) * B).sum(1)).clamp_(min=0).sqrt()


def work(step: Callable[[], Any]) -> Callable[[], Work]:
    def run() -> None:
        step()

    return lambda: Work(run, lambda: None)


def error(norm: torch.Tensor, want: torch.Tensor) -> float:
    return float(((norm.double() - want) / want).abs().max())


def single(N: int, K: int, r: int, seconds: float) -> dict[str, Any]:
    s = 2.0
    W, A, B = draw(N, K, r)
    base = squared_row_norm(W)
    version_counted, watched = RowNorms().add(W, A, B, s, version_counted=True), RowNorms().add(W, A, B, s)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "kernels": lambda: row_norm(W, A, B, s, base),
        "direct": lambda: row_norms([NormProblem(W, A, B, s)], in_graph=True)[0],
        "chunks": lambda: torch_path.row_norm(NormProblem(W, A, B, s), None),
        "identity bf16": lambda: identity(W, A, B, s, torch.bfloat16),
        "identity fp32": lambda: identity(W, A, B, s, torch.float32),
        "dense bf16": lambda: dense(W, A, B, s, torch.bfloat16),
        "factored fp32": lambda: factored(W, A, B, s, base),
        "||W||^2": lambda: squared_row_norm(W),
        "kept, version_counted": version_counted.get,
        "kept, checked": watched.get,
    }
    want = torch.cat(
        [(W[i : i + 512].double() + s * B[i : i + 512].double() @ A.double()).norm(dim=1) for i in range(0, N, 512)]
    )
    errors = {name: error(way(), want) for name, way in ways.items() if name != "||W||^2"}
    timings = paired([Contender(name, work(way)) for name, way in ways.items()], torch.device("cuda"), seconds).row()
    return {"N": N, "K": K, "r": r, "errors": errors, **timings}


def breakdown(step: Callable[[], Any]) -> dict[str, float]:
    """us of each kernel, L2 warm."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / 10 for event in trace.key_averages() if event.device_time_total}


def model(r: int, seconds: float) -> dict[str, Any]:
    """All modules of an 8B model at once."""
    norms, problems = RowNorms(), []
    for N, K in MODEL:
        W, A, B = draw(N, K, r)
        problems.append(NormProblem(W, A, B, 2.0, squared_row_norm(W)))
    watched = [norms.add(p.weight, p.A, p.B, 2.0) for p in problems]
    with norms.checked():
        [handle.get() for handle in watched]

    def check() -> None:
        with norms.checked():
            pass

    ways: dict[str, Callable[[], Any]] = {
        "all": lambda: row_norms(problems),
        "check": check,
        "||W||^2": lambda: [squared_row_norm(p.weight) for p in problems],
    }
    timings = paired([Contender(name, work(way)) for name, way in ways.items()], torch.device("cuda"), seconds).row()
    nbytes = sum(p.weight.numel() * 2 for p in problems if isinstance(p.weight, torch.Tensor))
    return {"modules": len(problems), "r": r, "GB": nbytes / 1e9, "kernels": breakdown(ways["all"]), **timings}


def sweep() -> list[dict[str, Any]]:
    """Block sizes of the product, 4096 x 4096."""
    rows = []
    for r, options in SWEEP.items():
        W, A, B = draw(4096, 4096, r)
        base, block = squared_row_norm(W), tables.rank_block(r)
        kept = tables.SIZES[block]
        want = (W.double() + 2.0 * B.double() @ A.double()).norm(dim=1)
        for sizes in options:
            tables.SIZES[block] = sizes
            triton_path._BATCHES._values.clear()
            try:
                wrong = error(row_norm(W, A, B, 2.0, base), want)
                parts = breakdown(functools.partial(row_norm, W, A, B, 2.0, base))
                rows.append({"r": r, "sizes": repr(sizes), "error": wrong, "us": parts})
            except Exception as failure:  # sizes that do not fit this GPU
                rows.append({"r": r, "sizes": repr(sizes), "failed": f"{type(failure).__name__}: {failure}"[:200]})
        tables.SIZES[block] = kept
        triton_path._BATCHES._values.clear()
    return rows


def probe(seconds: float = 1.0, with_sweep: bool = False) -> dict[str, Any]:
    """Everything; prints a line a case."""
    out: dict[str, Any] = {"device": torch.cuda.get_device_name(), "single": [], "model": []}
    for N, K in SHAPES:
        for r in RANKS:
            row = single(N, K, r, seconds)
            out["single"].append(row)
            print(f"{N} x {K} r {r}: " + ", ".join(
                f"{name} {ms * 1e3:.0f} us" + (f" ({row['errors'][name]:.1e})" if name in row["errors"] else "")
                for name, ms in row["ms"].items()
            ), row["failed"] or "", flush=True)  # fmt: skip
    W, A, B = draw(4096, 4096, 384)
    base = squared_row_norm(W)
    out["breakdown"] = {"4096 x 4096, r 384": breakdown(lambda: row_norm(W, A, B, 2.0, base))}
    print(out["breakdown"], flush=True)
    for r in (16, 128):
        out["model"].append(model(r, seconds))
        row = out["model"][-1]
        print(f"{row['modules']} modules, {row['GB']:.1f} GB, r {r}:", row["ms"], row["kernels"], flush=True)
        torch.cuda.empty_cache()
    if with_sweep:
        out["sweep"] = sweep()
        for row in out["sweep"]:
            print(row, flush=True)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    with torch.no_grad():
        found = probe(arguments.seconds, arguments.sweep)
    path = Path(os.environ.get("OUT", ".")) / "row_norm.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
