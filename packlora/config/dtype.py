"""What `dtype: auto` stands for."""

from __future__ import annotations

import json
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16", "float64")
BFLOAT16_SINCE = 8
"""The first compute capability, its major number, that multiplies bfloat16."""


def usual_dtype(output_dir: str, device: str) -> str:
    """That of the run in the output folder, where there is one; else bfloat16 on a GPU that computes in it, float32 elsewhere.
    Loads torch where it has to look for a GPU."""
    record = Path(output_dir) / "run.json"
    try:  # a run.json that is none is refused when it is read
        saved = json.loads(record.read_bytes())["config"]["dtype"] if record.is_file() else None
        if saved in DTYPES:
            return str(saved)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        pass
    if device != "auto" and not device.startswith("cuda"):
        return "float32"
    import torch

    try:
        named = None if device == "auto" else torch.device(device)
        known = torch.cuda.is_available() and torch.cuda.get_device_capability(named)[0] >= BFLOAT16_SINCE
    except (RuntimeError, AssertionError, ValueError):  # a device that is not there is refused when it is chosen
        known = False
    return "bfloat16" if known else "float32"
