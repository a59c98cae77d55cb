"""`packlora doctor`, on one screen: versions, devices, optional packages, and what is fast here, what is slow, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import groupby

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from packlora.base.demo_model import DEMO_MODEL, PACKAGE, cache_folder
from packlora.commands.speed import NEVER_RUN, has_mps, verdicts
from packlora.ops.gpu import architecture
from packlora.plans.identity import processor_name
from packlora.report.screen import Screen
from packlora.runtime.record import versions

OPTIONAL = {
    "bitsandbytes": ("'packlora[quant]'", "4 and 8 bits, 8-bit optimizers"),
    "torchao": ("'packlora[quant]'", "4 and 8 bits"),
    "compressed_tensors": ("'packlora[quant]'", "bases in its codes"),
    "datasets": ("'packlora[datasets]'", "data of the hub"),
    "liger_kernel": ("'packlora[liger]'", "fused rotary, activations"),
    "megatron": ("'packlora[megatron]'", "Megatron-Core models"),
    "optuna": ("'packlora[sweep]'", "sweeps by its sampler"),
    "tensorboard": ("'packlora[trackers]'", "trackers"),
    "trackio": ("'packlora[trackers]'", "trackers"),
    "wandb": ("wandb", "trackers"),
    "mlflow": ("mlflow", "trackers"),
    "gguf": ("'packlora[gguf]'", "smollm2-135m, llama.cpp, Ollama"),
    "matplotlib": ("'packlora[plot]'", "plan --plot"),
    "starlette": ("'packlora[serve]'", "packlora serve"),
    "pyarrow": ("'packlora[parquet]'", ".parquet data"),
    "triton": ("triton", "kernels on an NVIDIA GPU"),
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
    problems = _problems()
    for problem in problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not problems:
        console.print(Text(f"packlora can train on {_devices()}", style="green"), soft_wrap=True)
    return not problems


def _devices() -> str:
    """Devices that a run may be on, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} and the CPU"
    return f"the CPU, and by device: mps on this Mac's GPU, {NEVER_RUN}" if has_mps() else "the CPU"


def _machine() -> Iterator[tuple[str, str]]:
    """Rows on what there is: versions, processor, memory, GPUs."""
    yield "versions", ", ".join(f"{name} {found}" for name, found in versions().items())
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {_memory()} of memory"
    yield "processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for said, alike in groupby(numbers, _gpu):
        first, *others = alike
        yield f"cuda:{first}" + (f"-{others[-1]}" if others else ""), said
    cached = (cache_folder() / DEMO_MODEL / "config.json").exists()
    packaged = importlib.util.find_spec(PACKAGE) is not None
    state = (
        "converted" if cached else "installed, converted at first use" if packaged else "fetched with pip at first use"
    )
    yield DEMO_MODEL, f"{state} ({cache_folder() / DEMO_MODEL})"


def _gpu(index: int) -> str:
    """A GPU in words."""
    found = torch.cuda.get_device_properties(index)
    kind = f"sm_{found.major}{found.minor}" if torch.version.hip is None else architecture(torch.device("cuda", index))
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {kind}"


def _packages() -> Iterator[tuple[str, str]]:
    """Rows on optional packages: of those that are there, and of those that are not."""
    there = [module for module in OPTIONAL if importlib.util.find_spec(module) is not None]
    if there:
        yield "installed", ", ".join(there)
    missing: dict[str, dict[str, None]] = {}
    for module, (package, purpose) in OPTIONAL.items():
        if module not in there:
            known = missing.setdefault(package, {})
            if not any(purpose in own for own in known):
                known[purpose] = None
    names = {package: package.removeprefix("'packlora[").removesuffix("]'") for package in missing}
    parts = []
    for ours, before in ((True, "'packlora[NAME]', of these: "), (False, "")):
        found = [f"{names[own]} ({', '.join(missing[own])})" for own in missing if (names[own] != own) == ours]
        if found:
            parts.append(before + ", ".join(found))
    if parts:
        yield "pip install", "; or ".join(parts)


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
    except (AttributeError, ValueError, OSError):  # Windows has no such call
        return "unknown"
    return f"{total / 2**30:.0f} GiB"
