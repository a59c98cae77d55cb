"""A second class that is built of the same weights: a text model, and the whole model (with a vision tower, say) that other
programs build of the same folder. Either may be the one that is trained. The two have other names for the same modules.

base/classes.py finds the pair and puts it onto a model; adapters and their files are named by it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

TWIN = "_packlora_twin"


class Twin:
    """The second class of a model's folder.

    Args:
        build: gives a model of it without weights, and the names of its parameters and buffers by those of the first class.
        is_own: whether it is the class that the folder names as its architecture; else the first one is.
        is_trained: whether it is the class that a run trains; else the first one is.
    """

    def __init__(self, build: Callable[[], tuple[Any, dict[str, str]]], is_own: bool, is_trained: bool) -> None:
        self._build, self.is_own, self.is_trained = build, is_own, is_trained

    @cached_property
    def _built(self) -> tuple[Any, dict[str, str]]:
        return self._build()

    @property
    def model(self) -> Any:
        """Model of the other class, without weights."""
        return self._built[0]

    @cached_property
    def _there(self) -> dict[str, str]:
        names = self._built[1]
        modules = {one.rpartition(".")[0]: other.rpartition(".")[0] for one, other in names.items()}
        return modules | names

    @cached_property
    def _here(self) -> dict[str, str]:
        return {other: one for one, other in self._there.items()}

    def there(self, path: str) -> str | None:
        """The path of a module or a parameter of the first class in the second one; None where that has none such."""
        return self._there.get(path)

    def here(self, path: str) -> str | None:
        """Path in this model of a module of the other one; None where it has none."""
        return self._here.get(path)


def twin_of(model: Any) -> Twin | None:
    """Twin that set_twin put onto a model, or None."""
    return getattr(model, TWIN, None)


def set_twin(model: Any, twin: Twin | None) -> None:
    """Remember the second class of a model."""
    if twin is not None:
        setattr(model, TWIN, twin)
