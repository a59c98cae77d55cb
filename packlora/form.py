"""How the linear layers of a base model lie where they are not floats: what the rooms know of it (weight_form.py), and who does
it. The plug-ins (codes/, and fp8/ over it) are imported by name, where a run file asks for such layers or a folder has them.
What the operator asks of one weight is ops/lora_linear/frozen.py's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from packlora.config import Run
    from packlora.weight_form import WeightForm

PLUGIN, PRODUCTS = "packlora.codes.plugin", "packlora.fp8.plugin"
LIGHTER = "set quantization: nf4"
"""Remedy in words where a base of floats is too large."""


def plugin(name: str = PLUGIN) -> Any:
    """The plug-in of codes, codes/plugin.py, or of products in FP8, fp8/plugin.py, imported now."""
    return importlib.import_module(name)


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
    if run.compute != "dtype":
        plugin(PRODUCTS).check_asked(run, device)


def form_in(run: Run, config: Any, path: str) -> WeightForm | None:
    """The form of a base model; None of floats. Raises InputError where a run asks for another than its configuration says."""
    found: WeightForm | None = None if _floats(run, config) else plugin().form_in(run, config, path)
    return found if run.compute == "dtype" else plugin(PRODUCTS).form_over(found, run, path)


def prepared_form(run: Run, skeleton: PreTrainedModel, path: str, device: torch.device) -> WeightForm | None:
    """The same, with what it holds. Raises InputError where it cannot be met here, or not with other settings of the run."""
    floats = _floats(run, skeleton.config)
    found: WeightForm | None = None if floats else plugin().prepared_form(run, skeleton, path, device)
    return found if run.compute == "dtype" else plugin(PRODUCTS).prepared_form(found, run, skeleton, path)


def choices(run: Run, config: Any) -> list[dict[str, Any]]:
    """Forms that `fit: auto` may choose for a base that is saved as floats, as keys of a run file; the largest first."""
    found: list[dict[str, Any]] = [] if said_of(config)[0] or run.compute != "dtype" else plugin().choices(run)
    return found


def chosen(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a run of the keys of a form that `fit` chose. Raises ValueError where they are none."""
    values: dict[str, Any] = plugin().chosen(keys) if keys else {}
    return values


def _floats(run: Run, config: Any) -> bool:
    return run.quantization is None and not is_stored(config)
