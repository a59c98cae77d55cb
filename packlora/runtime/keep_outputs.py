"""The key keep_outputs of a run file, on the layers that jobs train; adapters/kept_outputs.py says what it is."""

from __future__ import annotations

import torch

from packlora.adapters.expert_layout import router_path
from packlora.adapters.kept_outputs import described, is_overwritten, why_product
from packlora.adapters.linear import AdaptedLinear


def keep_outputs(model: torch.nn.Module) -> str | None:
    """Let the adapted layers of a model keep their outputs where that is right.

    Args:
        model: after attach, its adapters with their first values.

    Returns:
        In words how many do and why others do not; None where no layer has DoRA.
    """
    reasons: list[str | None] = []
    for path, layer in model.named_modules():
        if not isinstance(layer, AdaptedLinear) or router_path(path) != path:
            continue
        dora = [own for own in layer.adapters.values() if own.magnitude is not None]
        if not dora:
            continue
        reason = why_product(
            bias=layer.bias is not None or any(own.bias is not None for own in layer.adapters.values()),
            scales_dropped=any(own.spec.scales_dropped for own in dora),
            magnitudes=[own.magnitude for own in dora if own.magnitude is not None],
            overwritten=is_overwritten(model, path),
        )
        reason = layer.why_product or reason
        layer.keep_output = reason is None
        reasons.append(reason)
    return described(reasons) if reasons else None
