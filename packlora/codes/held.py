"""Check of the weight files of a folder: the tensors named in their headers against what its config.json declares."""

from __future__ import annotations

import re
from collections.abc import Collection

from transformers import PreTrainedModel

from packlora.codes.stored import BITSANDBYTES, stored_as
from packlora.errors import InputError
from packlora.form import read_as_floats

FLOATS = "floats"
MARKS = {
    r"\.quant_state\.bitsandbytes__nf4$": ("nf4",),
    r"\.quant_state\.bitsandbytes__fp4$": ("fp4",),
    r"\.SCB$": ("int8",),
    r"\.qweight$": ("gptq", "awq"),
    r"\.weight_scale_inv$": ("fp8",),
    r"_blocks$": ("mxfp4",),
    r"\.(weight_packed|weight_scale)$": ("compressed-tensors",),
}
"""Ends of keys that only the files of these methods have."""
UNMARKED = ("torchao",)
"""Methods whose names of tensors depend on their version."""


def check_keys(path: str, keys: Collection[str], skeleton: PreTrainedModel) -> None:
    """Refuse a folder whose files hold something else than its configuration says. keys: names of all tensors in them."""
    stored = stored_as(skeleton.config, path)
    says = "mxfp4" if read_as_floats(skeleton.config) else FLOATS if stored is None else stored.as_asked.method
    held = {methods: key for mark, methods in MARKS.items() if (key := _first(mark, keys)) is not None}
    if not held and says not in (FLOATS, *UNMARKED):
        raise _refused(path, says, FLOATS)
    for methods, key in held.items():
        if says not in methods and not (says == "fp8" and methods == ("compressed-tensors",)):
            raise _refused(path, says, f"codes of {' or '.join(methods)} ({key})")
    if says in BITSANDBYTES and stored is not None:
        for layer in stored.layers(skeleton):
            own = {key.removeprefix(f"{layer}.") for key in keys if key.startswith(f"{layer}.")}
            if "weight" in own and own <= {"weight", "bias"}:
                raise _refused(path, says, f"floats in {layer}")


def _refused(path: str, says: str, holds: str) -> InputError:
    return InputError(
        f"base_model {path!r}: config.json says that the weights are {says}, and the files hold {holds}; mend its "
        "quantization_config, or take a whole copy of the model"
    )


def _first(mark: str, keys: Collection[str]) -> str | None:
    return next((key for key in keys if re.search(mark, key)), None)
