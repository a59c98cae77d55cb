"""`packlora merge --requantize`: the merged model in codes, and how far these are from its weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from packlora.base.device import choose_device
from packlora.base.load import own_skeleton
from packlora.base.weight_files import WeightFiles, keys_there
from packlora.codes.load import check_quantization, kept_as_floats, read_in_codes
from packlora.config import QuantizationConfig
from packlora.errors import InputError, quoted

DOUBLE = "-double"
MUCH = 1.0
"""Times what an adapter adds, beyond which codes may have lost it."""
KINDS = ("nf4", "nf4-double", "fp4", "fp4-double", "int8", "int4_weight_only", "int8_weight_only", "float8_weight_only")


def asked_codes(kind: str) -> QuantizationConfig | None:
    """Quantisation that a value of --requantize requests; None for `none`. Raises InputError where there is no such kind, or it
    is not supported here."""
    if kind == "none":
        return None
    if kind not in KINDS:
        raise InputError(f"--requantize {quoted(kind)}: give none, {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if kind.endswith("_weight_only"):
        found = QuantizationConfig(method="torchao", quant_type=kind)  # type: ignore[arg-type]
    else:
        found = QuantizationConfig(method=kind.removesuffix(DOUBLE), double_quant=kind.endswith(DOUBLE))  # type: ignore[arg-type]
    check_quantization(found, choose_device("auto"), "--requantize")
    return found


def requantise(
    dense: Path, out: Path, asked: QuantizationConfig, dtype: torch.dtype, adapted: Collection[str], added: float
) -> str:
    """Quantise the model of a folder as a run quantises a base while it loads it, and save it as transformers reads it.

    Args:
        adapted: paths of layers into which an adapter is folded.
        added: sum of squares of what it adds to them.

    Returns:
        What was made, and how far it is from the weights, in words.
    """
    (skeleton, _), files = own_skeleton(str(dense), None), WeightFiles(str(dense), None)
    model, codes = read_in_codes(str(dense), asked, dtype, choose_device("auto"), kept_as_floats(skeleton))
    skeleton.tie_weights()
    keys = keys_there(skeleton, files)
    error = size = lost = 0.0
    for path, own in codes.items():
        if (key := keys.get(f"{path}.weight")) is None:
            continue
        exact = files.read(key).float()
        off = float((own.values(dtype).float().cpu() - exact).square().sum())
        error, size, lost = error + off, size + float(exact.square().sum()), lost + off * (path in adapted)
    model.save_pretrained(out)
    times = (lost / added) ** 0.5 if added else 0.0
    return (
        f"the merged model is saved in {asked.described} codes, which are {(error / max(size, 1e-300)) ** 0.5:.2%} off its "
        f"weights (root mean square), in adapted layers {times:.1f} times what the adapter adds"
        + ": little of it may be left, which the adapter beside its base keeps"
        * (times > MUCH)
    )
