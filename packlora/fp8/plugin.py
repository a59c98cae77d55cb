"""Products in FP8 as the rest of the package asks for them; see packlora/form.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.load import read_model
from packlora.codes.load import quantised_paths
from packlora.codes.weight import QuantizedLinear
from packlora.config import Run
from packlora.errors import InputError
from packlora.fp8.change import CodedBesideLinear, why_not_beside_on
from packlora.fp8.rows import coded
from packlora.fp8.saved import is_saved_in_fp8, saved_rows
from packlora.fp8.weight import Fp8Linear, TwiceCoded, takes, why_not_on
from packlora.weight_form import WeightForm


@dataclass(frozen=True, slots=True)
class Fp8Form:
    """How linear layers lie whose products are in FP8. saved: how the files have them; None: floats. beside: codes lie beside
    the floats, for what dropout changes of DoRA. See packlora/form.py, WeightForm."""

    saved: WeightForm | None
    beside: bool = False
    held: tuple[int, int] = (0, 0)
    key = "compute"
    by_launches = True

    @property
    def method(self) -> str:
        return "fp8 products of DoRA under dropout" if self.beside else "fp8 products"

    @property
    def described(self) -> str:
        return self.method if self.saved is None else f"{self.method} of {self.saved.described}"

    def read(
        self, path: str, revision: str | None, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False,
        notes: list[str] | None = None,
    ) -> PreTrainedModel:  # fmt: skip
        if self.saved is None:
            model = read_model(path, revision, dtype, trust_remote_code)
        else:
            model = self.saved.read(path, revision, dtype, device, trust_remote_code)
        return self._put(model, dtype, device, path, notes).to(device)

    def own_layers(
        self, model: PreTrainedModel, dtype: torch.dtype, path: str, notes: list[str] | None = None
    ) -> PreTrainedModel:
        made = model if self.saved is None else self.saved.own_layers(model, dtype, path)
        return self._put(made, dtype, model.device, path, notes)

    def _put(
        self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, path: str, notes: list[str] | None
    ) -> PreTrainedModel:
        return put_beside(model, device, path) if self.beside else put_layers(model, dtype, device, path, notes)

    def counted(self, skeleton: PreTrainedModel, path: str, dtype: torch.dtype) -> Fp8Form:
        shapes = [skeleton.get_submodule(name).weight.shape for name in _paths(skeleton)]
        held = sum((2 + self.beside * dtype.itemsize) * N * K + 4 * (N + K) for N, K in shapes)
        return replace(self, held=(sum(N * K for N, K in shapes), held))

    def share(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        raise NotImplementedError("Run.check_quantized refuses a base in parts")


def check_asked(run: Run, device: torch.device) -> None:
    """Raises InputError where a run's products cannot be in FP8 on its device."""
    found = why_not_on(device) if run.compute == "fp8" else why_not_beside_on(device)
    if found is None and device.type == "cuda" and run.dtype != "bfloat16":
        found = f"on a GPU results of FP8 are bfloat16, and dtype is {run.dtype}; set dtype: bfloat16"
    if found is not None:
        raise InputError(f"compute: {run.compute} cannot be met: {found}; or leave it out")


def compute_in_fp8(forwards: Any, compute: str) -> list[str]:
    """See peft.py."""
    from packlora.fp8 import peft

    return peft.compute_in_fp8(forwards, compute)


def form_over(saved: WeightForm | None, run: Run, path: str) -> Fp8Form:
    """The form of a run's layers over that of the files. Raises InputError where these are codes of something else."""
    beside = run.compute == "dora_fp8"
    if saved is not None and (beside or not is_saved_in_fp8(saved)):
        made = f"quantization is {saved.described}" if run.quantization is not None else f"it is {saved.described}"
        raise InputError(
            f"compute: {run.compute} takes a base model that is saved as floats{'' if beside else ' or in FP8'}, and of "
            f"base_model {path!r} {made}; leave one of them out"
        )
    return Fp8Form(saved, beside)


def prepared_form(saved: WeightForm | None, run: Run, skeleton: PreTrainedModel, path: str) -> Fp8Form:
    """The same, with what it holds. Raises InputError where other settings of the run do not go with it."""
    try:
        run.check_quantized(f"compute: {run.compute}")
    except ValueError as error:
        raise InputError(str(error)) from None
    return form_over(saved, run, path).counted(skeleton, path, getattr(torch, run.dtype))


def _paths(model: PreTrainedModel) -> list[str]:
    """The layers of floats, by path, whose products are in FP8."""
    return [path for path in quantised_paths(model) if takes(model.get_submodule(path))]


def put_layers(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device, path: str, notes: list[str] | None = None
) -> PreTrainedModel:
    """Put layers whose products are in FP8 in the place of linear layers, one after the other.

    Args:
        notes: gets what is to be known of them.

    Raises:
        InputError: a weight is not finite.
    """
    again = 0
    in_codes = [name for name, own in model.named_modules() if isinstance(own, QuantizedLinear) and takes(own)]
    for name in in_codes or _paths(model):
        layer: Any = model.get_submodule(name)
        settings = None
        try:
            if isinstance(layer, QuantizedLinear):
                rows, settings = saved_rows(layer.frozen.codes), layer.frozen.codes.settings
                again += rows is None
            else:
                rows = None
            rows = coded(_weight_of(layer, device)) if rows is None else rows
        except ValueError as error:
            raise InputError(f"base_model {path!r}: {name}: {error}; load a sound copy") from None
        own = Fp8Linear(TwiceCoded.of(rows, settings), layer.bias, dtype).to(device)
        model.set_submodule(name, own)
    if again and notes is not None:
        notes.append(
            f"base_model {path!r}: {again} layers are saved in blocks of FP8, which are rounded again, by output"
        )
    return model


def put_beside(model: PreTrainedModel, device: torch.device, path: str) -> PreTrainedModel:
    """Put codes beside the weights of linear layers of floats. Errors as those of put_layers."""
    for name in _paths(model):
        own = CodedBesideLinear(model.get_submodule(name).to(device))
        try:
            own.frozen.make()
        except ValueError as error:
            raise InputError(f"base_model {path!r}: {name}: {error}; load a sound copy") from None
        model.set_submodule(name, own)
    return model


def _weight_of(layer: Any, device: torch.device) -> torch.Tensor:
    if isinstance(layer, QuantizedLinear):
        return layer.frozen.codes.values(torch.float32)
    weight_NK: torch.Tensor = layer.weight
    return weight_NK.detach().to(device)
