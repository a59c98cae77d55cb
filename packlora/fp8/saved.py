"""Base models that are saved in FP8: whether their codes can be multiplied as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from packlora.codes.weight import Codes
from packlora.fp8.rows import CODE, Rows
from packlora.weight_form import WeightForm


def is_saved_in_fp8(form: WeightForm) -> bool:
    """Whether the files of a form have codes of e4m3, by their configuration."""
    stored: Any = getattr(form, "stored", None)
    if stored is None:
        return False
    if form.method == "compressed-tensors":
        kinds = [group["weights"] for group in stored.told["config_groups"].values()]
        return all(str(kind.get("type")) == "float" and int(kind["num_bits"]) == 8 for kind in kinds)
    return form.method == "fp8" or stored.as_asked.quant_type == "float8_weight_only"


def saved_rows(codes: Codes) -> Rows | None:
    """Codes with one scale an output, or one for all, as they are saved; None where their scales are of blocks."""
    tensors: Mapping[str, torch.Tensor] = codes.tensors()
    N, K = codes.shape
    rest = [
        tensor for name, tensor in tensors.items() if name and tensor.is_floating_point() and tensor.numel() in (1, N)
    ]
    if tensors[""].shape != (N, K) or tensors[""].itemsize != 1 or len(rest) != 1:
        return None
    rows = Rows(tensors[""].detach().view(CODE), rest[0].detach().float().reshape(-1).expand(N).contiguous())
    return rows if torch.equal(rows.values(torch.float32), codes.values(torch.float32)) else None
