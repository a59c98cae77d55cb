"""Attention of one new token of each sequence to the keys and values that a cache holds of it.

torch's fused attention over all slots of the cache at once. The queries that share a key are its rows, so nothing is repeated;
on a CPU their number is rounded up, since MKL's products of one or three rows have other bits in one thread than in another.

Shapes: S slots, L places of a slot, H heads of queries, h of keys and values, G = H / h, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

EVEN = 4
"""Multiple of which the rows of a product on a CPU are, so that a row has the same bits whatever other rows there are."""


@dataclass(slots=True)
class Visible:
    """Masks of the places that each slot's token sees, made once for all layers with the same window.

    places_S: int64, place of the slot's token, which sees itself.
    length: L, places that are looked at.
    """

    places_S: torch.Tensor
    length: int
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [S, 1, 1, L]. window: a token sees itself and the window - 1 tokens before it."""
        if window not in self._masks:
            keys_L, last_S1 = torch.arange(self.length, device=self.places_S.device), self.places_S[:, None]
            seen = keys_L <= last_S1
            if window is not None:
                seen &= keys_L > last_S1 - window
            self._masks[window] = seen[:, None, None]
        return self._masks[window]


def cached_attention(
    q_SHD: torch.Tensor, k_ShLD: torch.Tensor, v_ShLD: torch.Tensor, visible: Visible, scale: float,
    window: int | None = None, softcap: float | None = None, sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the token of each slot, [S, H, D] of the values.

    Args:
        k_ShLD, v_ShLD: finite everywhere, also at places that nobody sees.
        scale, window, softcap, sinks_H: as those of packed_attention.
    """
    S, H, _ = q_SHD.shape
    h, mask = k_ShLD.shape[1], visible.mask(window)
    groups = H // h
    q = q_SHD.unflatten(1, (h, groups))
    if softcap is not None or sinks_H is not None:
        return _written_out(q, k_ShLD, v_ShLD, mask, scale, softcap, sinks_H).flatten(1, 2)
    if q.device.type == "cpu" and (more := -groups % EVEN):
        q = F.pad(q, (0, 0, 0, more))
    y = F.scaled_dot_product_attention(q, k_ShLD, v_ShLD, attn_mask=mask.expand(S, 1, q.shape[2], -1), scale=scale)
    return y[:, :, :groups].flatten(1, 2)


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Scores in memory, because no fused attention takes a softcap or sinks; softmax in float32 as the models do."""
    scores = q @ k.transpose(-2, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.masked_fill(~mask, float("-inf")).to(wide)
    if sinks_H is not None:
        sinks = sinks_H.detach().to(wide).view(1, q.shape[1], -1, 1).expand(len(q), -1, -1, 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].to(q.dtype) @ v
    return torch.softmax(scores, -1).to(q.dtype) @ v
