"""How the linear layers of a base model lie where they are not floats: what the rooms know of it, and the plug-in that does it.

The plug-in (codes/) is imported by its name, where a run file asks for such layers or a folder has them. What the operator asks
of one weight is ops/lora_linear/frozen.py's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from packlora.config import Run

PLUGIN = "packlora.codes.plugin"
LIGHTER = "set quantization: nf4"
"""Remedy in words where a base of floats is too large."""


class WeightForm(Protocol):
    """The form of a base model's linear layers."""

    @property
    def method(self) -> str: ...

    @property
    def described(self) -> str:
        """Description for messages."""

    @property
    def held(self) -> tuple[int, int]:
        """Numbers of the layers that are held so, and bytes that they take."""

    def read(
        self, path: str, revision: str | None, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False,
        notes: list[str] | None = None,
    ) -> PreTrainedModel:  # fmt: skip
        """The model on its device with these layers, the rest of this dtype.

        Args:
            notes: gets what is to be known of it.

        Raises:
            InputError: it cannot be loaded, or something of it is in a form that is not read here.
        """

    def counted(self, skeleton: PreTrainedModel, path: str, dtype: torch.dtype) -> WeightForm:
        """The same, with what it holds of a model in a run of this dtype."""

    def share(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Put layers of this form in the place of a model's, which is on the meta device and is to be shared by rows. dtype: of
        the run."""


def plugin() -> Any:
    """The plug-in, codes/plugin.py, imported now."""
    return importlib.import_module(PLUGIN)


def said_of(config: Any) -> tuple[str, dict[str, Any]]:
    """Read the form of a model's files from its configuration: the method, empty for floats, and the whole entry."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return "", {}
    told: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    return str(getattr(told.get("quant_method"), "value", told.get("quant_method"))), told


def read_as_floats(config: Any) -> bool:
    """Whether the files of a model have codes of experts alone, of which transformers makes floats while it loads them."""
    return said_of(config)[0] == "mxfp4"


def is_stored(config: Any) -> bool:
    """Whether what is loaded of a model's files is not all floats, by its configuration."""
    return said_of(config)[0] not in ("", "mxfp4")


def check_asked(run: Run, device: torch.device) -> None:
    """Raises InputError where the form that a run asks for cannot be made on its device."""
    if run.quantization is not None:
        plugin().check_asked(run, device)


def form_in(run: Run, config: Any, path: str) -> WeightForm | None:
    """The form of a base model; None of floats. Raises InputError where a run asks for another than its configuration says."""
    found: WeightForm | None = None if _floats(run, config) else plugin().form_in(run, config, path)
    return found


def prepared_form(run: Run, skeleton: PreTrainedModel, path: str, device: torch.device) -> WeightForm | None:
    """The same, with what it holds. Raises InputError where it cannot be met here, or not with other settings of the run."""
    floats = _floats(run, skeleton.config)
    found: WeightForm | None = None if floats else plugin().prepared_form(run, skeleton, path, device)
    return found


def choices(run: Run, config: Any) -> list[dict[str, Any]]:
    """Forms that `fit: auto` may choose for a base that is saved as floats, as keys of a run file; the largest first."""
    found: list[dict[str, Any]] = [] if is_stored(config) else plugin().choices(run)
    return found


def chosen(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a run of the keys of a form that `fit` chose. Raises ValueError where they are none."""
    values: dict[str, Any] = plugin().chosen(keys) if keys else {}
    return values


def _floats(run: Run, config: Any) -> bool:
    return run.quantization is None and not is_stored(config)
