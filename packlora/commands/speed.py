"""Part of `packlora doctor` on speed: what is fast on this machine, what is slow, and why."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from packlora.base.device import native_dtype
from packlora.ops.gpu import HAS_TRITON, OLDEST, capability, has_copy_engine, why_no_kernels
from packlora.runtime.machine_speed import machine_bandwidth, machine_flops
from packlora.tune.kernels import described_sizes

NEVER_RUN = "where packlora has never been run"
HELD_BY_OTHERS = 2**30
"""Bytes of a GPU from which on other processes are worth a line."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Speed of a part of training on this machine, with the reason."""

    speed: Literal["fast", "slow"]
    what: str
    why: str


def verdicts() -> list[Verdict]:
    """Verdicts on the current GPU, or on the CPU where there is none; what is fast comes first."""
    gpu = torch.cuda.is_available()
    found = [*(_of_gpu(torch.device("cuda", torch.cuda.current_device())) if gpu else _of_cpu())]
    return sorted(found, key=lambda one: one.speed)


def _of_gpu(device: torch.device) -> Iterator[Verdict]:
    reason, (major, minor) = why_no_kernels(device), capability(device)
    sixteen = (major, minor) >= OLDEST
    dtype = native_dtype(device)
    yield Verdict("fast" if major >= 7 else "slow", "matrix products", _measured(device, dtype))
    if not sixteen:
        why = f"capability {major}.{minor} has none; dtype: auto is {dtype} here"
        yield Verdict("slow", "bfloat16", why)
    if reason is None:
        yield Verdict("fast", "adapters, attention", "packlora's kernels; samples packed without padding")
        yield Verdict("fast", "launches", "CUDA graphs, where they can be (docs/support.md)")
        if not has_copy_engine(device):
            yield Verdict("slow", "fused products", "fused GEMMs are for Hopper and data-centre Blackwell")
        sizes = described_sizes(device)
        yield Verdict("slow" if "packlora tune" in sizes else "fast", "sizes of kernels", sizes)
    else:
        yield Verdict("slow", "adapters, attention", f"torch's own, sample by sample: {reason}")
        yield Verdict("slow", "launches", "by the host: no CUDA graphs without the kernels")
    usual = quick_launches()
    yield Verdict("fast" if usual.startswith("on") else "slow", "quick launches", usual)
    liger = importlib.util.find_spec("liger_kernel") is not None
    why = "liger-kernel's" if liger else "torch's own; pip install 'packlora[liger]' fuses them"
    yield Verdict("fast" if liger else "slow", "rotary, activations", why)
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    if held > HELD_BY_OTHERS:
        yield Verdict("slow", "memory", f"{held / 2**30:.1f} GiB are held by other processes and by CUDA")


def has_mps() -> bool:
    """Whether this is a Mac whose GPU torch can use."""
    return torch.backends.mps.is_available()


def _of_cpu() -> Iterator[Verdict]:
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if has_mps():
        dtype = native_dtype(torch.device("mps"))
        yield Verdict("fast", "device: mps", f"this Mac's GPU, {NEVER_RUN}; torch's operations, dtype: auto is {dtype}")
        yield Verdict("slow", "device: auto", "is the CPU here; mps must be asked for")
    else:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield Verdict("slow", "training", f"on the CPU: no GPU is usable (torch built {built})")
    why = _measured(torch.device("cpu"), "float32") + f", {threads} of {cores} cores"
    used = "" if threads >= cores / 2 else "; OMP_NUM_THREADS or torch.set_num_threads holds the others back"
    yield Verdict("fast" if not used else "slow", "matrix products", why + used)
    bfloat16 = cpu_bfloat16()
    yield Verdict(
        "fast" if bfloat16 == "in hardware" else "slow", "bfloat16", f"{bfloat16}; dtype: auto is float32 here"
    )
    yield Verdict("slow", "kernels, CUDA graphs", "none on a CPU; torch's operations")


def _measured(device: torch.device, dtype: str) -> str:
    """Speed of a large matrix product, and of a copy on a GPU."""
    try:
        flops = machine_flops(device, dtype)
        copied = machine_bandwidth(device) if device.type == "cuda" else None
    except RuntimeError as error:  # no memory is left for it
        return f"{dtype}, not measured: {str(error).splitlines()[0]}"
    memory = "" if copied is None else f", memory {copied / 1e9:,.0f} GB/s"
    return f"measured: {flops / 1e12:.3g} TFLOP/s in {dtype}{memory}"


def quick_launches() -> str:
    """Whether kernels are launched again without Triton's own door, which takes the host longer; if not, why."""
    if not torch.cuda.is_available():
        return "off: no GPU is usable"
    if not HAS_TRITON:
        return "off: the triton package is not installed"
    from packlora.ops import launcher

    reason = launcher.why_usual()
    return "on: what Triton passes to a kernel is known here" if reason is None else f"off: {reason}"


def cpu_bfloat16() -> str:
    """Whether the processor multiplies bfloat16, in words."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "support unknown"
    return "in hardware" if "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags else "emulated"
