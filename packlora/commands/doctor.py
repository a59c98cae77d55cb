"""`packlora doctor`: versions, devices, and which features can be used here, with reasons for the others."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from packlora.base.demo_model import DEMO_MODEL, PACKAGE, cache_folder
from packlora.ops.gpu import HAS_TRITON
from packlora.report.screen import Screen
from packlora.runtime.record import processor_name, versions
from packlora.tune.kernels import described_sizes

OPTIONAL = {
    "bitsandbytes": (
        "'packlora[quant]'",
        "base models of 4 and 8 bits (quantization), 8-bit AdamW and Lion (train.optim)",
    ),
    "torchao": ("'packlora[quant]'", "base models in torchao's int8, int4 and float8 (quantization)"),
    "compressed_tensors": ("'packlora[quant]'", "base models that are saved in compressed-tensors' codes"),
    "datasets": ("'packlora[datasets]'", "data sets of the Hugging Face hub as data paths"),
    "liger_kernel": ("'packlora[liger]'", "liger-kernel's rotary embedding and gated activations on a GPU (liger)"),
    "megatron": ("'packlora[megatron]'", "adapters on Megatron-Core models (packlora.megatron)"),
    "optuna": ("'packlora[sweep]'", "sweeps by optuna's sampler (sweep.method)"),
    "tensorboard": ("'packlora[trackers]'", "trackers: [tensorboard]"),
    "trackio": ("'packlora[trackers]'", "trackers: [trackio]"),
    "wandb": ("wandb", "trackers: [wandb]"),
    "mlflow": ("mlflow", "trackers: [mlflow]"),
    "gguf": ("'packlora[gguf]'", "the small packaged model, smollm2-135m; export for llama.cpp and Ollama"),
    "matplotlib": ("'packlora[plot]'", "the picture of a timeline (plan --plot)"),
    "pyarrow": ("'packlora[parquet]'", ".parquet files and saved data sets as data paths"),
    "triton": ("triton", "packlora's kernels on an NVIDIA GPU"),
}
"""Optional packages: the name for pip to install them, and their purpose."""


def print_doctor() -> bool:
    """Print everything; True if packlora can train here."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, found in versions().items():
        table.add_row(name, found)
    table.add_row("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    table.add_row("processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use")
    capability = torch.backends.cpu.get_cpu_capability()
    table.add_row("", f"instructions: {capability}; bfloat16 {_cpu_bfloat16()}")
    table.add_row("memory", _memory())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            table.add_row(
                f"cuda:{index}",
                f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}",
            )
            table.add_row("", f"sizes of kernels: {described_sizes(torch.device('cuda', index))}")
    else:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        table.add_row("GPU", f"none usable (torch built {built}); training runs on the CPU")
    table.add_row("quick launches", quick_launches())
    cached = (cache_folder() / DEMO_MODEL / "config.json").exists()
    packaged = importlib.util.find_spec(PACKAGE) is not None
    state = (
        "converted" if cached else "installed, converted at first use" if packaged else "fetched with pip at first use"
    )
    table.add_row(DEMO_MODEL, f"{state} ({cache_folder() / DEMO_MODEL})")
    for module, (package, purpose) in OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        found = "installed" if there else f"not installed, pip install {package}"
        table.add_row(module, Text(f"{found}: {purpose}"))  # brackets would be markup
    console = Screen()
    console.print(table)
    problems = _problems()
    for problem in problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not problems:
        where = "a GPU and the CPU" if torch.cuda.is_available() else "the CPU"
        console.print(Text(f"packlora can train on {where}", style="green"))
    return not problems


def quick_launches() -> str:
    """Whether kernels are launched again without Triton's own door, which takes the host longer; if not, why."""
    if not torch.cuda.is_available():
        return "off: no GPU is usable"
    if not HAS_TRITON:
        return "off: the triton package is not installed"
    from packlora.ops import launcher

    reason = launcher.why_usual()
    return "on: what Triton passes to a kernel is known here" if reason is None else f"off: {reason}"


def _problems() -> list[str]:
    """Requirements of the installed packlora that are missing or too old."""
    out = []
    try:
        wanted = requires("packlora") or []
    except PackageNotFoundError:
        return ["packlora is not installed (pip install -e .), so its requirements cannot be checked"]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            out.append(f"{requirement.name} is not installed; needed: {requirement}")
            continue
        if not requirement.specifier.contains(found.partition("+")[0], prereleases=True):
            out.append(f"{requirement.name} {found} does not satisfy {requirement}")
    return out


def _cpu_bfloat16() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "support unknown"
    return "in hardware" if "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags else "emulated (slow)"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.0f} GiB"
