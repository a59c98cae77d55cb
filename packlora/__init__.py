"""packlora: train one or many LoRA / DoRA adapters on one frozen language model, at close to the cost of the frozen model.

    import packlora
    result = packlora.train("run.yaml")        # or a dict of the same shape, or a packlora.Run
    report = packlora.accelerate(model)        # any PEFT LoRA model, in place; packlora.restore(model) undoes it

Importing the package does not import torch, so that `packlora --help` answers at once.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["InputError", "Run", "__version__", "accelerate", "callbacks", "restore", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "accelerate", "callbacks"):  # the first two are modules that can be called: see their ends
        return importlib.import_module(f"packlora.{name}")
    if name == "Run":
        return importlib.import_module("packlora.config").Run
    if name == "InputError":
        return importlib.import_module("packlora.errors").InputError
    if name == "restore":
        return importlib.import_module("packlora.accelerate").restore
    raise AttributeError(f"module 'packlora' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
