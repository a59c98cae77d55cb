"""Identity of measurements: the device and the versions that they depend on, and the folder where they are cached."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import packlora


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with its threads, which change what is fastest."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def processor_name() -> str:
    """The CPU's model, as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_root() -> Path:
    """PACKLORA_CACHE, or packlora in the user's cache folder."""
    chosen = os.environ.get("PACKLORA_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "packlora")


def cache_path(device: torch.device, folder: str = "plans") -> Path:
    """<folder>/<device>.json in the cache."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return cache_root() / folder / f"{slug}.json"


def measured_versions() -> dict[str, str]:
    """Versions of the packages that the times depend on."""
    out = {"packlora": packlora.__version__, "torch": torch.__version__, "cuda": str(torch.version.cuda or "none")}
    try:
        out["triton"] = version("triton")
    except PackageNotFoundError:
        out["triton"] = "none"
    return out


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels may have sizes that were measured on this device: a GPU that is here."""
    return device.type == "cuda" and torch.cuda.is_available()
