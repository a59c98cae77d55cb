"""The Triton kernel of a decode pass: one new token of each sequence is put into its cache, and attends to what is there.

A program takes the heads of queries that share a head of keys, for one row. It reads the places that its token sees and no
others, in one order: a row has the same bits whatever other rows there are.

Shapes: R rows, S slots, L places of a slot, H heads of queries, h of keys, D features of a head.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.attention.kernel import LOG2E, _scores
from packlora.ops.attention.triton_path import _dense
from packlora.ops.gpu import on_device

_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}


@triton.jit
def cached_attention_kernel(
    q, new_k, new_v, k, v, y, rows, slots, places, sinks, q_h, q_r, k_h, k_r, v_h, v_r, L,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (R, h).

    Args:
        q: [H, R, D]. new_k, new_v: [h, R, D], of the new tokens.
        k, v: [S, h, L, D]; the new ones are written at their places.
        y: [R, H, D]; written, 0 in rows of padding.
        rows, places: [S], row and place of each slot's token. slots: [R], of each row; one of padding names any.
        sinks: [H], or None.
        q_h, q_r and so on: elements from one head, or row, to the next.
        SCALE, CAP, WINDOW: see packed_attention; 0 for no cap or window.
        GROUP, BG: heads of queries to one of keys, and what is missing to rows of a product.
        D, BLOCK_D: features, and what is missing to a power of two.
        BN: places of a tile.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    token, place = tl.load(rows + slot), tl.load(places + slot).to(tl.int32)
    cols, members = tl.arange(0, BLOCK_D), tl.arange(0, BG)
    fits, heads = cols < D, head * GROUP + members
    own = (members < GROUP)[:, None] & fits[None, :]
    at_y = y + (row.to(tl.int64) * tl.num_programs(1) * GROUP + heads)[:, None] * D + cols[None, :]
    if token != row:  # of padding
        tl.store(at_y, tl.zeros((BG, BLOCK_D), dtype=y.dtype.element_ty), mask=own)
        return
    q_tile = tl.load(q + heads.to(tl.int64)[:, None] * q_h + token * q_r + cols[None, :], mask=own, other=0.0)
    key = tl.load(new_k + head.to(tl.int64) * k_h + token * k_r + cols, mask=fits, other=0.0)
    value = tl.load(new_v + head.to(tl.int64) * v_h + token * v_r + cols, mask=fits, other=0.0)
    kept = (slot * tl.num_programs(1) + head) * L * D
    tl.store(k + kept + place * D + cols, key.to(k.dtype.element_ty), mask=fits)
    tl.store(v + kept + place * D + cols, value.to(v.dtype.element_ty), mask=fits)
    UNIT: tl.constexpr = (CAP if CAP > 0 else SCALE) * LOG2E
    product = tl.sum(q_tile.to(tl.float32) * key.to(tl.float32)[None, :], 1)
    score, _one = _scores(product, SCALE, CAP)
    top = score * UNIT  # the token itself comes first: what is in the cache need not be read after it was written
    total = tl.full((BG,), 1.0, dtype=tl.float32)
    acc = tl.zeros((BG, BLOCK_D), dtype=tl.float32) + value.to(tl.float32)[None, :]
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=members < GROUP, other=0.0).to(tl.float32) * LOG2E
        first_score, top = top, tl.maximum(top, sink)
        total = tl.exp2(first_score - top) + tl.exp2(sink - top)
        acc *= tl.exp2(first_score - top)[:, None]
    low = 0
    if WINDOW > 0:
        low = tl.maximum(place - WINDOW + 1, 0)
    for first in range(low // BN * BN, place, BN):
        at = first + tl.arange(0, BN)
        seen = (at >= low) & (at < place)
        where, here = kept + at.to(tl.int64)[:, None] * D + cols[None, :], seen[:, None] & fits[None, :]
        k_tile, v_tile = tl.load(k + where, mask=here, other=0.0), tl.load(v + where, mask=here, other=0.0)
        scores, _all = _scores(tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee"), SCALE, CAP)
        scores = tl.where(seen[None, :], scores * UNIT, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights, factor = tl.exp2(scores - highest[:, None]), tl.exp2(top - highest)
        total = total * factor + tl.sum(weights, 1)
        acc = acc * factor[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        top = highest
    tl.store(at_y, (acc / total[:, None]).to(y.dtype.element_ty), mask=own)


def attend(
    q_HRD: torch.Tensor, k_hRD: torch.Tensor, v_hRD: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor],
    rows_S: torch.Tensor, slots_R: torch.Tensor, places_S: torch.Tensor, scale: float, window: int | None,
    softcap: float | None, sinks_H: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of each row's token to itself and to what its slot holds before its place, [R, H, D]; its key and value are in
    the cache then.

    Args:
        kept: keys and values [S, h, L, D], contiguous.
        rows_S, places_S: int64, row and place of each slot's token. slots_R: int64, slot of each row; of rows with one slot
            rows_S names the one that counts, the others are padding and get zeros.
        scale, window, softcap, sinks_H: as those of packed_attention.
    """
    q, k, v = (_dense(tensor) for tensor in (q_HRD, k_hRD, v_hRD))
    (H, R, D), h, L = q.shape, len(k), kept[0].shape[2]
    y_RHD = torch.empty(R, H, D, dtype=q.dtype, device=q.device)
    strides = tuple(stride for tensor in (q, k, v) for stride in tensor.stride()[:2])
    assert H % h == 0 and kept[0].is_contiguous() and kept[1].is_contiguous()
    args = (q, k, v, *kept, y_RHD, rows_S, slots_R, places_S, sinks_H, *strides, L)
    aligned = [tensor.data_ptr() % 16 for tensor in (q, k, v, *kept, rows_S, slots_R, places_S)]
    sinks = None if sinks_H is None else sinks_H.dtype
    dtypes = tuple(tensor.dtype for tensor in (q, k, v, *kept))
    key = (q.device, dtypes, H, R, D, h, L, strides, *aligned, sinks, scale, window, softcap)
    with on_device(q.device):
        launcher.launch(
            cached_attention_kernel, (R, h), args, launcher.bounded(_LAUNCHES), key,
            SCALE=scale, CAP=softcap or 0.0, WINDOW=window or 0, GROUP=H // h, D=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)), BG=max(16, triton.next_power_of_2(H // h)),
            BN=64 if D <= 128 else 32, num_warps=4, num_stages=2,
        )  # fmt: skip
    return y_RHD
