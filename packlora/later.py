"""A library that others import at once and few runs use: it is loaded when it is first asked for something."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """Stands for a module until an attribute of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def load_later(name: str) -> None:
    """From now on `import name` loads nothing; the first look at what it holds does. A package that is not there stays so."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    module = _Later(name)
    module.__spec__, module.__file__ = spec, spec.origin  # what is asked of every module
    sys.modules[name] = module
