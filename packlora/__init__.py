"""packlora: train one or many LoRA / DoRA adapters on one frozen language model, at close to the cost of the frozen model.

    import packlora
    trainer = packlora.Trainer("Qwen/Qwen3-0.6B", jobs=[packlora.Job("colours", data=rows)], output_dir="runs/mine")
    result = trainer.train()                   # result["colours"].load() is a PeftModel
    result = packlora.train("run.yaml")        # or a dict of the same shape, or a packlora.Run; so is preview(run)
    packlora.generate("runs/mine/colours", ["Which colour is the sky?"])
    packlora.merge("runs/mine/colours", "merged")
    report = packlora.accelerate(model)        # any PEFT LoRA model, in place; packlora.restore(model) undoes it

Importing the package does not import torch, so that `packlora --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packlora import callbacks, events
    from packlora.api.answers import generate, merge
    from packlora.api.job import Job
    from packlora.api.trainer import Trainer
    from packlora.commands.preview import preview
    from packlora.config import Run
    from packlora.errors import InputError, ProcessError, WriteError
    from packlora.live.accelerate import accelerate, restore
    from packlora.live.report import Report
    from packlora.ops.lora_linear.plan import Plan as Plan
    from packlora.result import JobResult, Result
    from packlora.runtime.run import train

# MKL reads it at the first product of a process; else threads of an Intel processor share sums by the number of rows
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.3.0"
__all__ = [
    "InputError", "Job", "JobResult", "ProcessError", "Report", "Result", "Run", "Trainer", "WriteError", "__version__",
    "accelerate", "callbacks", "events", "generate", "merge", "preview", "restore", "train",
]  # fmt: skip

_HOMES = {
    "InputError": "packlora.errors",
    "Job": "packlora.api.job",
    "JobResult": "packlora.result",
    "Plan": "packlora.ops.lora_linear.plan",
    "Report": "packlora.live.report",
    "Result": "packlora.result",
    "Run": "packlora.config",
    "ProcessError": "packlora.errors",
    "Trainer": "packlora.api.trainer",
    "WriteError": "packlora.errors",
    "accelerate": "packlora.live.accelerate",
    "callbacks": "packlora.callbacks",
    "events": "packlora.events",
    "generate": "packlora.api.answers",
    "merge": "packlora.api.answers",
    "preview": "packlora.commands.preview",
    "restore": "packlora.live.accelerate",
    "train": "packlora.runtime.run",
}
"""Modules of the public names; they are imported when a name is first used. callbacks and events are modules themselves. Plan,
which is public no more, is found for one more release."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'packlora' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = importlib.import_module(_HOMES[name])
    value = globals()[name] = home if _HOMES[name] == f"packlora.{name}" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
