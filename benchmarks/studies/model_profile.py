"""What a training step of an 8B model is made of on a GPU: time of every kernel, by name, where the GPU waits, and for how long
the host is busy.

    python -m benchmarks model-profile --out benchmarks/results/model-profile-h200.json

The model and the contenders are those of `benchmarks model` with LoRA; every one is measured alone, three steps to warm up
and one under torch's profiler, which sees the GPU alone.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from benchmarks import model
from benchmarks.options import Options
from benchmarks.results import check_writable, device_slug, text_table, write_results
from packlora.base.device import choose_device
from packlora.errors import InputError

CONTENDERS = ("frozen", "packlora", "packlora_recompute")
SHOWN = 12
"""Kernels of each contender in the table; the file has all that take a hundredth of a millisecond."""
NAME = 100
"""Letters of a kernel's name that are kept."""
WAIT_US = 5.0
PROTOCOL = (
    "{config}, random bfloat16 weights, {samples} x {length} random tokens, forward with labels and backward, LoRA r 16, "
    "dropout 0.1. {liger}. wall_ms: median of 5 steps, each waited for; host_ms: until the step's call returned, in the "
    "same steps; busy_ms: time with a kernel on the GPU in one further step under the profiler; kernels: of that step, "
    "[name, calls, ms]; waits: of that step, time without a kernel before a kernel, where it is over 5 us, [name, times, ms]. "
    "ckpt: gradient checkpointing (use_reentrant=False) of every decoder layer. Contenders one after "
    "the other, not paired."
)


def step_times(step: Any, clear: Any) -> tuple[float, float]:
    """Milliseconds of a step, and until its call returned."""
    walls, hosts = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
        clear()
    return 1e3 * statistics.median(walls), 1e3 * statistics.median(hosts)


def kernels_of(step: Any) -> dict[str, Any]:
    """busy_ms, kernels and waits of a step, as PROTOCOL has them, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    ]
    return summed(spans)


def summed(spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """The same from (start, stop, name) of every kernel, us."""
    busy = end = 0.0
    spent: dict[str, float] = collections.defaultdict(float)
    idle: dict[str, float] = collections.defaultdict(float)
    calls, waits = collections.Counter[str](), collections.Counter[str]()
    for start, stop, name in sorted(spans):
        if end and start - end > WAIT_US:
            idle[name] += start - end
            waits[name] += 1
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        calls[name] += 1
        spent[name] += stop - start

    def longest(us: dict[str, float], times: collections.Counter[str]) -> list[list[Any]]:
        return [
            [name[:NAME], times[name], us[name] / 1e3] for name in sorted(us, key=lambda n: -us[n]) if us[name] >= 10
        ]

    return {"busy_ms": busy / 1e3, "kernels": longest(spent, calls), "waits": longest(idle, waits)}


def measured(name: str, base: Any, ids_BS: torch.Tensor, checkpointing: bool) -> dict[str, Any]:
    work = model.causal_lm(name, name, base, ids_BS, 16, 0.1, checkpointing).make()
    for _ in range(3):
        work.step()
        work.clear()
    wall, host = step_times(work.step, work.clear)
    case = f"{name} {'ckpt' if checkpointing else 'plain'}"
    return {"case": case, "wall_ms": wall, "host_ms": host, **kernels_of(work.step)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="four layers of the model")
    args = parser.parse_args(arguments)
    device = choose_device("auto")
    if device.type != "cuda":
        raise InputError("model_profile: found no GPU; it measures kernels of one")
    check_writable(args.out)
    liger = model.use_liger(device)
    case = next(case for case in model.cases(Options(device, quick=args.quick)) if case.part == "lora")
    base = model.build(case.config, device, LlamaForCausalLM)
    ids_BS = torch.randint(0, case.config.vocab_size, (case.samples, case.length), device=device)
    rows = []
    for checkpointing in (False, True):
        for name in CONTENDERS:
            rows.append(measured(name, base, ids_BS, checkpointing))
            torch.cuda.empty_cache()
            print({key: value for key, value in rows[-1].items() if not isinstance(value, list)}, flush=True)
    lines = [[row["case"], name[:60], str(n), f"{ms:.2f}"] for row in rows for name, n, ms in row["kernels"][:SHOWN]]
    print("\n".join(text_table(["contender", "kernel", "calls", "ms"], lines)))
    figures = {f"{row['case'].replace(' ', '_')}_{key}": row[key] for row in rows for key in ("wall_ms", "busy_ms")}
    words = f"{case.shape}'s shape ({case.config.num_hidden_layers} layers)"
    protocol = PROTOCOL.format(config=words, samples=case.samples, length=case.length, liger=liger)
    write_results(args.out, f"model-profile-{device_slug(device)}", protocol, rows, figures, str(device))


if __name__ == "__main__":
    main()
