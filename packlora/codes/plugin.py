"""Quantised bases as the rest of the package asks for them; see packlora/form.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from packlora.codes.held import check_keys
from packlora.codes.load import check_quantization, codes_in, own_layers, read_by_library, read_quantised
from packlora.codes.stored import MADE, Stored, as_stored, check_stored, stored_as
from packlora.config import QuantizationConfig, Run
from packlora.errors import InputError

__all__ = [
    "as_stored", "check_asked", "check_config", "check_keys", "choices", "chosen", "form_in", "form_of_answers",
    "left_as_they_are", "own_layers", "prepared_form", "reader",
]  # fmt: skip
CHOICES = ("int8", "nf4")
"""Methods that `fit: auto` may choose, the largest first."""


@dataclass(frozen=True, slots=True)
class Form:
    """How linear layers are quantised. stored: how the files have them; None: they are made while they are read. See
    packlora/form.py, WeightForm."""

    asked: QuantizationConfig
    stored: Stored | None
    held: tuple[int, int] = (0, 0)

    @property
    def method(self) -> str:
        return self.asked.method

    @property
    def described(self) -> str:
        return self.asked.described

    def read(
        self, path: str, revision: str | None, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False,
        notes: list[str] | None = None,
    ) -> PreTrainedModel:  # fmt: skip
        return read_quantised(path, revision, self.asked, self.stored, dtype, device, trust_remote_code, notes)

    def read_by_library(
        self, path: str, revision: str | None, dtype: torch.dtype, device: torch.device
    ) -> PreTrainedModel:
        """The same model with the layers of the library that made the codes, as PEFT adapts them."""
        return read_by_library(path, revision, self.asked, self.stored, dtype, device)

    def counted(self, skeleton: PreTrainedModel, path: str, dtype: torch.dtype) -> Form:
        return replace(self, held=codes_in(skeleton, self.asked, path, dtype))

    def share(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        from packlora.codes.gathered import share_codes

        share_codes(model, self.asked, dtype)


def check_asked(run: Run, device: torch.device) -> None:
    """Raises InputError where what a run asks for cannot be made on its device."""
    if run.quantization is not None and run.quantization.method in MADE:
        check_quantization(run.quantization, device)


def check_config(config: Any, path: str) -> None:
    """Raises InputError where a model's configuration says codes that are not read here."""
    stored_as(config, path)


def form_in(run: Run, config: Any, path: str) -> Form | None:
    """The form that a run asks for, or that the model's configuration says. Raises InputError where these differ."""
    asked = check_stored(run.quantization, config, path)
    return None if asked is None else Form(asked, stored_as(config, path))


def prepared_form(run: Run, skeleton: PreTrainedModel, path: str, device: torch.device) -> Form | None:
    """The same, with what it holds. Raises InputError where it cannot be met here, or not with other settings of the run."""
    form = form_in(run, skeleton.config, path)
    if form is None:
        return None
    if run.quantization is None or form.method not in MADE or form.stored is not None:
        check_quantization(form.asked, device, f"base_model {path!r}")
        try:
            run.check_quantized(f"base_model {path!r} is saved as {form.described}")
        except ValueError as error:
            raise InputError(str(error)) from None
    return form.counted(skeleton, path, getattr(torch, run.dtype))


def choices(run: Run) -> list[dict[str, Any]]:
    """Forms that `fit: auto` may choose, as keys of a run file; none where a key that is written speaks against codes."""
    if not run.leaves("quantization"):
        return []
    try:
        run.check_quantized("fit: auto", made=True)
    except ValueError:
        return []
    return [{"quantization": method} for method in CHOICES]


def chosen(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a run of the keys of one of these forms. Raises ValueError where it is none of them."""
    if (method := keys.get("quantization")) not in (None, *CHOICES):
        raise ValueError(f"quantization is {method!r}; fit chooses one of {', '.join(CHOICES)}")
    return {} if method is None else {"quantization": QuantizationConfig(method=method)}


def form_of_answers(
    config: Any, path: str, trained_on: Sequence[Mapping[str, Any]], device: torch.device
) -> Form | None:
    """The form of a base model that answers: as it is saved, or as it was when all adapters were trained; None of floats.

    Args:
        trained_on: what the files of the adapters say, unchecked.

    Raises:
        InputError: the codes of the folder are not read on this device.
    """
    stored = stored_as(config, path)
    asked = _as_trained(trained_on, device) if stored is None else stored.as_asked
    if asked is None:
        return None
    check_quantization(asked, device, f"base_model {path!r}")
    return Form(asked, stored)


def _as_trained(trained_on: Sequence[Mapping[str, Any]], device: torch.device) -> QuantizationConfig | None:
    """How the base of all adapters was quantised when they were trained, where that can be done here."""
    found = []
    for told in trained_on:
        try:
            found.append(QuantizationConfig(**{key: value for key, value in told.items() if key != "dtype"}))
            check_quantization(found[-1], device)
        except (ValidationError, TypeError, InputError):
            return None
    return found[0] if found[0].method in MADE and all(one == found[0] for one in found) else None


def reader(kind: type) -> Any:
    """Reader of the weights under a PEFT layer (live/foreign.py, WeightReader); None for unknown kinds."""
    from packlora.codes.peft import quantised_kinds, stored_weight

    kinds = quantised_kinds()
    return partial(stored_weight, kinds[kind]) if kind in kinds else None


def left_as_they_are(model: torch.nn.Module) -> AbstractContextManager[None]:
    """See peft.py."""
    from packlora.codes import peft

    return peft.left_as_they_are(model)
