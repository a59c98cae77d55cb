"""`packlora doctor`, on one screen: versions, devices, optional packages, and what is fast here, what is slow, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from packlora.base.demo_model import DEMO_MODEL, PACKAGE, cache_folder
from packlora.commands.speed import verdicts
from packlora.plans.identity import processor_name
from packlora.report.screen import Screen
from packlora.runtime.record import versions

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
    "starlette": ("'packlora[serve]'", "the training service (packlora serve)"),
    "pyarrow": ("'packlora[parquet]'", ".parquet files and saved data sets as data paths"),
    "triton": ("triton", "packlora's kernels on an NVIDIA GPU"),
}
"""Optional packages: the name for pip to install them, and their purpose."""


def print_doctor() -> bool:
    """Print everything; True if packlora can train here."""
    console, table = Screen(), Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in [*_machine(), *_packages()]:
        table.add_row(name, Text(text))  # brackets would be markup
    console.print(table)
    console.print()
    speeds = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        speeds.add_column(no_wrap=True)
    speeds.add_column(overflow="fold")
    for one in verdicts():
        speeds.add_row(Text(one.speed, style="green" if one.speed == "fast" else "yellow"), one.what, Text(one.why))
    console.print(speeds)
    console.print()
    problems = _problems()
    for problem in problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not problems:
        where = "a GPU and the CPU" if torch.cuda.is_available() else "the CPU"
        console.print(Text(f"packlora can train on {where}", style="green"))
    return not problems


def _machine() -> Iterator[tuple[str, str]]:
    """Rows on what there is: versions, processor, memory, GPUs."""
    yield "versions", ", ".join(f"{name} {found}" for name, found in versions().items())
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    yield "memory", _memory()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
    cached = (cache_folder() / DEMO_MODEL / "config.json").exists()
    packaged = importlib.util.find_spec(PACKAGE) is not None
    state = (
        "converted" if cached else "installed, converted at first use" if packaged else "fetched with pip at first use"
    )
    yield DEMO_MODEL, f"{state} ({cache_folder() / DEMO_MODEL})"


def _packages() -> Iterator[tuple[str, str]]:
    """Rows on optional packages: one of those that are there, and one of each that is not."""
    there = [module for module in OPTIONAL if importlib.util.find_spec(module) is not None]
    yield "installed", ", ".join(there) or "no optional package"
    for module, (package, purpose) in OPTIONAL.items():
        if module not in there:
            yield module, f"not installed, pip install {package}: {purpose}"


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


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.0f} GiB"
