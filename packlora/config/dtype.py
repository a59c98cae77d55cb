"""What `dtype: auto` stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BFLOAT16_SINCE = 8
"""The first compute capability, its major number, that multiplies bfloat16."""


def usual_dtype(output_dir: Any, device: Any) -> str:
    """That of the run in the output folder, where there is one; else bfloat16 on a GPU that computes in it, float32 elsewhere.

    Args:
        output_dir, device: as they are in a run file, checked or not.
    """
    try:
        saved = json.loads((Path(output_dir) / "run.json").read_bytes())["config"]["dtype"]
        if isinstance(saved, str):
            return saved
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ):  # a run.json that is none is refused when it is read
        pass
    if not isinstance(device, str) or not (device == "auto" or device.startswith("cuda")):
        return "float32"
    import torch

    try:
        named = None if device == "auto" else torch.device(device)
        known = torch.cuda.is_available() and torch.cuda.get_device_capability(named)[0] >= BFLOAT16_SINCE
    except (RuntimeError, AssertionError, ValueError):  # a device that is not there is refused when it is chosen
        known = False
    return "bfloat16" if known else "float32"
