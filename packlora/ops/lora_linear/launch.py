"""Launches of kernels.py, gradient_kernels.py and fused.py: block sizes, buffers and grids. Everything segments on the current
stream, nothing waits.

Block sizes come from `Sizes`, one set per dtype; benchmarks/LOG.md has what was measured. What a launch needs beside its
operands is settled when it is made for the first time: `launched` makes it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from packlora.ops.dropout.kernel import packed_dropout
from packlora.ops.dropout.keys import dropout_threshold, signed
from packlora.ops.gpu import has_copy_engine, processors
from packlora.ops.launcher import Descriptor, launch, launched
from packlora.ops.lora_linear.kernels import backward as gradient_kernels
from packlora.ops.lora_linear.kernels import forward as kernels
from packlora.ops.lora_linear.kernels import gemm as fused
from packlora.ops.lora_linear.packed import Packed
from packlora.ops.lora_linear.tables import GroupTables, SegmentTables
from packlora.ops.lora_linear.types import Layer, Segment

if TYPE_CHECKING:
    from packlora.ops.lora_linear.steps import Composition


@dataclass(frozen=True, slots=True)
class Sizes:
    """Block sizes, warps and stages. *_m: tokens, *_n and *_k: columns, *_r: ranks, *_band: tokens that one program sums, or
    *_bands, of which the launch chooses. few_*: where there would be fewer programs than processors take. several_*: where
    no segment has all tokens. narrow_*: of inputs_kernel where it writes dx and there are no more than 16 ranks."""

    down_m: int = 32
    down_k: int = 128
    down_r: int = 64
    down_warps: int = 4
    down_stages: int = 4
    few_down_m: int = 16
    few_down_k: int = 256
    up_m: int = 64
    up_n: int = 64
    up_loop: int = 8
    up_warps: int = 4
    up_stages: int = 2
    grad_m: int = 64
    several_grad_m: int = 32
    grad_n: int = 256
    few_grad_n: int = 128
    grad_r: int = 32
    grad_warps: int = 4
    grad_stages: int = 3
    grad_bands: tuple[int, ...] = (256, 512, 1024, 2048)
    joint_m: int = 32
    joint_n: int = 128
    joint_warps: int = 4
    joint_stages: int = 4
    scale_m: int = 32
    scale_n: int = 128
    scale_band: int = 256
    scale_warps: int = 4
    scale_stages: int = 3
    inputs_m: int = 64
    inputs_k: int = 128
    few_inputs_k: int = 64
    several_inputs_k: int = 64
    inputs_r: int = 64
    inputs_bands: tuple[int, ...] = (512, 1024)
    inputs_warps: int = 4
    inputs_stages: int = 3
    narrow_k: int = 64
    narrow_stages: int = 4

    @property
    def tokens(self) -> tuple[int, ...]:
        """Block sizes for which SegmentTables must have a table."""
        return (self.down_m, self.few_down_m, self.up_m, *self.grad_bands, self.scale_band, *self.inputs_bands)


HALF = Sizes()
SINGLE = Sizes(
    down_m=32, down_k=32, down_r=32, down_stages=2, few_down_m=32, few_down_k=32, up_m=32, grad_m=32, grad_n=64, few_grad_n=64,
    grad_stages=2, grad_bands=(128,), joint_m=32, joint_n=64, joint_stages=2, scale_band=64,
    inputs_m=32, inputs_k=64, few_inputs_k=64, inputs_r=32, inputs_bands=(128,), inputs_stages=2, narrow_k=64,
    narrow_stages=2,
)  # fmt: skip
FUSED_M, FUSED_K = 128, 64
FUSED_TILES = ((256, 8, 3, 1.0), (128, 8, 5, 0.54))
"""Columns of the fused product's tiles with their warps and stages, and what a tile takes, of the first one's time."""
DESCRIBED = 1 << 24
BAND_START = 128
"""What a program that walks over a band takes to start, in tokens of its walk."""


def sizes_for(dtype: torch.dtype) -> Sizes:
    return SINGLE if dtype == torch.float32 else HALF


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    """What a launch's key must say of an operand that may be absent or of any dtype."""
    return None if t is None else t.dtype


def _block(rank: int, largest: int) -> int:
    """Power of two that covers a rank, from 16 to `largest`."""
    block = 16
    while block < rank and block < largest:
        block *= 2
    return block


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _rows_of(packed: Packed, alone: Segment | None) -> tuple[int, int, int]:
    """Of the segment that has all tokens, zeros if there is none: dropout threshold, first row in the stacked A, padded rank."""
    return (0, 0, 0) if alone is None else (dropout_threshold(alone.dropout), *packed.layout.rows[alone.adapter])


def _place_of(packed: Packed, alone: Segment | None, index: int) -> tuple[int, int, int]:
    """Of its adapter on a layer: column in S, offset in the flat B, and padded rank."""
    if alone is None:
        return 0, 0, 0
    place = packed.layout.places[alone.adapter, index]
    return place.column, place.b_offset, place.padded


def down(
    x_TK: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, keys_T2: torch.Tensor | None, salt: int,
    alone: Segment | None,
) -> torch.Tensor:  # fmt: skip
    """S [T, width]; rows of tokens without an adapter and columns past an adapter's rank are not written."""
    size, width, (T, K), stride = sizes_for(x_TK.dtype), packed.layout.width, x_TK.shape, x_TK.stride(0)
    S = torch.empty(T, width, dtype=x_TK.dtype, device=x_TK.device)
    BM, BK, BR = size.down_m, size.down_k, _block(width, size.down_r)
    if segments.counts[BM] < processors(x_TK.device):
        BM = size.few_down_m
        BK = size.few_down_k if BR <= 32 else BK  # cards of any generation have 99 KiB
    blocks = segments.blocks[BM]
    threshold, first, rank = _rows_of(packed, alone)
    args = (
        x_TK, packed.A_RK, S, tables.row_scales, keys_T2, blocks, tables.rows, signed(salt), K, stride, width, T, threshold,
        first, rank,
    )  # fmt: skip
    key = ("down", packed.shape, stride, keys_T2 is None)
    if not launched(segments.sites, key, args):
        launch(
            kernels.down_kernel, (segments.counts[BM], _cdiv(width, BR)), args, segments.sites, key,
            ALONE=alone is not None, DROP=segments.dropout, ASM=packed_dropout(x_TK), PRECISION="ieee", BM=BM, BK=BK, BR=BR,
            num_warps=size.down_warps, num_stages=size.down_stages,
        )  # fmt: skip
    return S


def up(
    S: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, index: int, bias: torch.Tensor | None,
    base: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """S B' + bias of one layer, [T, N], onto which the base product is to be accumulated; or added to the base product, in
    place."""
    N = packed.layout.sizes[index]
    y = torch.empty(S.shape[0], N, dtype=S.dtype, device=S.device) if base is None else base
    _up(S, packed, tables, segments, index, y, y, None, bias, base is not None, False)
    return y


def up_composed(
    S: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, index: int, composition: Composition,
    base: torch.Tensor, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """y = g z + bias with z = base + S B', and z where it is to be kept. base [T, N] is written over."""
    y = torch.empty_like(base) if keep else base
    _up(S, packed, tables, segments, index, base, y, composition, composition.bias, True, keep)
    return y, base if keep else None


def _up(
    S: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, index: int, z: torch.Tensor, y: torch.Tensor,
    composition: Composition | None, bias: torch.Tensor | None, epilogue: bool, keep: bool,
) -> None:  # fmt: skip
    size, N = sizes_for(S.dtype), packed.layout.sizes[index]
    blocks, span = segments.blocks[size.up_m], size.up_n * size.up_loop
    args = (
        S, packed.B[index], bias, None if composition is None else composition.g, z, y, blocks, tables.places[index],
        tables.adapters, N, packed.layout.width, span,
    )  # fmt: skip
    key = ("up", packed.shape, index, _dtype(bias), composition is None, epilogue, keep)
    if not launched(segments.sites, key, args):
        launch(
            kernels.up_kernel, (_cdiv(N, span), segments.counts[size.up_m]), args, segments.sites, key,
            HAS_BIAS=bias is not None, EPILOGUE=epilogue, COMPOSED=composition is not None, KEEP=keep, PRECISION="ieee",
            BM=size.up_m, BN=size.up_n, BR=_block(packed.layout.max_padded[index], 64), num_warps=size.up_warps,
            num_stages=size.up_stages,
        )  # fmt: skip


def compose(z: torch.Tensor, y: torch.Tensor, segments: SegmentTables, composition: Composition) -> None:
    """y = g z + bias, [T, N]; y may be z."""
    size, N, bias = sizes_for(z.dtype), z.shape[1], composition.bias
    blocks = segments.blocks[size.up_m]
    launch(
        kernels.compose_kernel, (_cdiv(N, 256), segments.counts[size.up_m]),
        (z, y, composition.g, bias, blocks, composition.adapters, N),
        sites=segments.sites, key=("compose", z.dtype, N, bias is None),
        HAS_BIAS=bias is not None, BM=16, BN=256, num_warps=4, num_stages=2,
    )  # fmt: skip


def compose_rows(
    z_tN: torch.Tensor, y_tN: torch.Tensor, g_N: torch.Tensor | None, bias_N: torch.Tensor | None, minus: int = 0,
    add: bool = False,
) -> None:  # fmt: skip
    """y = (g - minus) z + bias for the rows of one segment, or y += that; without g it is 1. y may be z."""
    T, N = z_tN.shape
    launch(
        kernels.rows_kernel, (_cdiv(N, 256), _cdiv(T, 16)), (z_tN, y_tN, g_N, bias_N, T, N, minus),
        ADD=add, HAS_G=g_N is not None, HAS_BIAS=bias_N is not None, BM=16, BN=256, num_warps=4, num_stages=1,
    )  # fmt: skip


def scale(
    d_TN: torch.Tensor,
    kept: torch.Tensor | None,
    segments: SegmentTables,
    composition: Composition,
    need_dm: bool,
    need_d: bool,
    of_y: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """e = g d [T, N], and by adapter, float32 [adapters, 2, N]: the gradient of the magnitude, from the sum of d times what was
    kept (z, or y where `of_y`), and the sum of d. Those that are not needed hold anything."""
    size, (T, N) = sizes_for(d_TN.dtype), d_TN.shape
    bands = segments.blocks[size.scale_band]
    e = torch.empty(T, N, dtype=d_TN.dtype, device=d_TN.device)
    num_bands = segments.counts[size.scale_band]
    parts = torch.empty((num_bands, 2, N) if need_dm or need_d else (1,), device=d_TN.device)
    launch(
        gradient_kernels.scale_kernel, (_cdiv(N, size.scale_n), num_bands),
        (d_TN, kept, e, parts, composition.g, bands, composition.adapters, N, d_TN.stride(0)),
        sites=segments.sites, key=("scale", d_TN.dtype, N, d_TN.stride(0), kept is None, need_dm, need_d),
        NEED_DZ=need_dm, NEED_D=need_d, BM=size.scale_m, BN=size.scale_n, STAGES=size.scale_stages,
        num_warps=size.scale_warps, num_stages=2,
    )  # fmt: skip
    return e, _sum_tokens(parts, segments, composition, size.scale_band, of_y) if need_dm or need_d else None


def _sum_tokens(
    parts: torch.Tensor, segments: SegmentTables, composition: Composition, band: int, of_y: bool
) -> torch.Tensor:
    """What `scale` gives by adapter [adapters, 2, N], from the sums of bands [bands, 2, N]."""
    N, size = parts.shape[2], band
    rows = composition.sum_rows
    out = torch.empty(composition.adapters, 2, N, device=parts.device)
    launch(
        gradient_kernels.sum_rows_kernel, (_cdiv(N, 128), rows.shape[0]),
        (parts, out, segments.blocks[size], segments.ranges[size], rows, composition.g, composition.w, N, 2, 0, 0),
        sites=segments.sites, key=("sum_tokens", N, size, of_y),
        ALONE=False, MAGNITUDE=True, OF_Y=of_y, BANDS=32, BK=128, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def ratio(
    magnitude_N: torch.Tensor, norm_N: torch.Tensor, g_N: torch.Tensor, w_N: torch.Tensor, sites: dict[Hashable, Any]
) -> None:  # fmt: skip
    """g = magnitude / norm and w = norm. sites: of launches with this N."""
    N = len(g_N)
    launch(
        kernels.ratio_kernel, (_cdiv(N, 512),), (magnitude_N, norm_N, g_N, w_N, N),
        sites=sites, key=(magnitude_N.dtype, norm_N.dtype, g_N.data_ptr() % 16),
        BN=512, num_warps=4, num_stages=1,
    )  # fmt: skip


Scaled = tuple["Composition", "torch.Tensor | None", bool, bool, bool]
"""Of one layer: what `scale` takes of it: its composition, what was kept for the backward, whether the magnitude's gradient and
the sum of d are needed, and whether y was kept."""


def grad(
    d: Sequence[torch.Tensor | None], S: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, dtype: torch.dtype,
    need_dB: bool, scaled: Mapping[int, Scaled], alone: Segment | None,
) -> tuple[list[torch.Tensor | None], torch.Tensor, list[torch.Tensor | None], dict[int, torch.Tensor | None]]:  # fmt: skip
    """e per layer (d itself where it is not scaled), dS [T, width], per layer dB, flat as B is, in `dtype`, and the sums of
    scaled layers, as `scale` gives them. d: per layer [T, N] or None where nothing came back."""
    size, layout, (T, width), device = sizes_for(S.dtype), packed.layout, S.shape, S.device
    dS = torch.empty(T, width, dtype=S.dtype, device=device)
    if any(t is None for t in d):
        dS.zero_()
    adapter, threshold = (0, 0) if alone is None else (alone.adapter, dropout_threshold(alone.dropout))
    e: list[torch.Tensor | None] = list(d)
    out: list[torch.Tensor | None] = []
    sums: dict[int, torch.Tensor | None] = {}
    for index, d_TN in enumerate(d):
        part_width = layout.max_padded[index]
        own = scaled.get(index)
        # one block of ranks must cover all, and there must be one
        if own is not None and d_TN is not None and not 0 < part_width <= size.grad_r:
            composition, kept, *wanted = own
            e[index], sums[index] = scale(d_TN, kept, segments, composition, *wanted)
            d_TN, own = e[index], None
        if d_TN is None or not part_width:
            out.append(None)
            continue
        BM, BN = (size.grad_m, size.grad_n) if own is None else (size.joint_m, size.joint_n)
        if own is None and alone is None:
            BM = size.several_grad_m
        N, BR = d_TN.shape[1], _block(part_width, size.grad_r)
        if few := own is None and _few(_cdiv(N, BN), size.grad_bands, segments, device):
            BN = size.few_grad_n
        spans = _cdiv(N, BN)
        band = size.grad_bands[0] if few else _band(size.grad_bands, spans, segments, device)
        bands = segments.blocks[band]
        dS_parts = torch.empty(spans, T, part_width, device=device)
        dB_parts = torch.empty(segments.counts[band], N, part_width, device=device) if need_dB else None
        e_TN, kept, g, parts, need_dz, need_d, of_y = None, None, None, None, False, False, False
        if own is not None:
            composition, kept, need_dz, need_d, of_y = own
            g = composition.g
            e_TN = e[index] = torch.empty(T, N, dtype=S.dtype, device=device)
            if need_dz or need_d:
                parts = torch.empty(segments.counts[band], 2, N, device=device)
        place = _place_of(packed, alone, index)
        tma = described(d_TN) and (not need_dz or kept is None or described(kept))
        args = (
            Descriptor(d_TN, [BM, BN]) if tma else d_TN, S, packed.B[index], dS_parts, dB_parts,
            Descriptor(kept, [BM, BN]) if tma and need_dz and kept is not None else kept, e_TN, parts, g,
            bands, tables.places[index], tables.scalings[index], tables.adapters, T, N, d_TN.stride(0), width,
            part_width, adapter, band, threshold, *place,
        )  # fmt: skip
        key = ("grad", packed.shape, index, tma, d_TN.stride(0), need_dB, own is None, kept is None, need_dz, need_d)
        if not launched(segments.sites, key, args):
            launch(
                gradient_kernels.grad_kernel, (spans, segments.counts[band], _cdiv(part_width, BR)), args, segments.sites, key,
                ALONE=alone is not None, TMA=tma, NEED_DB=need_dB, COMPOSED=own is not None, NEED_DZ=need_dz, NEED_D=need_d,
                PRECISION="ieee", BM=BM, BN=BN, BR=BR, STAGES=size.grad_stages if own is None else size.joint_stages,
                num_warps=size.grad_warps if own is None else size.joint_warps, num_stages=1,
            )  # fmt: skip
        if own is not None:
            sums[index] = None if parts is None else _sum_tokens(parts, segments, own[0], band, of_y)
        dB = torch.empty(layout.b_sizes[index], dtype=dtype, device=device) if need_dB else None
        tiles, num_tiles, ranks = segments.blocks[size.down_m], segments.counts[size.down_m], min(BR, 32)
        blocks = _cdiv(N, size.down_m) if need_dB else 0
        sum_args = (
            dS_parts, dS, dB_parts, dB, tiles, num_tiles, bands, segments.ranges[band], tables.places[index], blocks, N,
            width, part_width, spans, T * part_width, T, segments.counts[band], *place,
        )  # fmt: skip
        sum_key = ("sum_grads", packed.shape, index, dtype, spans, band, need_dB)
        if not launched(segments.sites, sum_key, sum_args):
            launch(
                gradient_kernels.sum_grads_kernel,
                (num_tiles + blocks * (tables.adapters if alone is None else 1), _cdiv(part_width, ranks)), sum_args,
                segments.sites, sum_key,
                ALONE=alone is not None, BM=size.down_m, BN=size.down_m, BR=ranks, AHEAD=8, num_warps=4, num_stages=1,
            )  # fmt: skip
        out.append(dB)
    return e, dS, out, sums


def _band(bands: tuple[int, ...], columns: int, segments: SegmentTables, device: torch.device) -> int:
    """Tokens of a band, for kernels with a program for each band and block of columns: those that take the fewest turns of all
    processors, two programs on each; of equals the longest."""
    band = segments.bands.get((bands, columns))
    if band is None:
        slots = 2 * processors(device)
        turns = {band: _cdiv(columns * segments.counts[band], slots) for band in bands}
        band = segments.bands[bands, columns] = min(bands, key=lambda band: (turns[band] * (band + BAND_START), -band))
    return band


def _few(columns: int, bands: tuple[int, ...], segments: SegmentTables, device: torch.device) -> bool:
    """Whether a program for each of the shortest bands and block of columns makes fewer than two for each processor."""
    return columns * segments.counts[bands[0]] < 2 * processors(device)


def described(t: torch.Tensor) -> bool:
    """Whether kernels read it through a tensor descriptor: 16 bits, aligned rows, Hopper's copy engine, and enough of it to
    be worth the host's time for a descriptor."""
    return (
        (t.numel() >= DESCRIBED or not t.is_cuda) and t.element_size() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0
        and t.data_ptr() % 16 == 0
        and has_copy_engine(t.device)
    )  # fmt: skip


def inputs(
    x_TK: torch.Tensor, dS: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables,
    keys_T2: torch.Tensor | None, salt: int, dtype: torch.dtype, need_dx: bool, need_dA: bool, alone: Segment | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """drop(dS A) [T, K], onto which the base products are to be accumulated, and the stacked dA [rows, K] in `dtype`."""
    size, layout, (T, K), device = sizes_for(x_TK.dtype), packed.layout, x_TK.shape, x_TK.device
    width = layout.width
    BR = _block(width, size.inputs_r)
    BK, stages = (size.narrow_k, size.narrow_stages) if BR == 16 and need_dx else (size.inputs_k, size.inputs_stages)
    if few := not need_dx and _few(_cdiv(K, BK), size.inputs_bands, segments, device):
        BK = size.few_inputs_k
    elif not need_dx and alone is None:
        BK = size.several_inputs_k
    band = size.inputs_bands[0] if few else _band(size.inputs_bands, _cdiv(K, BK), segments, device)
    bands = segments.blocks[band]
    blocks, stride = _cdiv(width, BR), x_TK.stride(0)
    threshold, first, rank = _rows_of(packed, alone)
    dx = torch.empty(T, K, dtype=x_TK.dtype, device=device) if need_dx else None
    parts = dA = None
    if need_dA:
        parts = torch.empty(segments.counts[band], width, K, dtype=torch.float32, device=device)
    # one pass where a single block of ranks covers all; else dx in a pass of its own, and dA by blocks of ranks
    for with_dx, with_dA in [(need_dx, need_dA)] if blocks == 1 else [(need_dx, False), (False, need_dA)]:
        if not (with_dx or with_dA):
            continue
        tma = with_dA and described(x_TK)
        args = (
            Descriptor(x_TK, [size.inputs_m, BK]) if tma else x_TK, dS, packed.A_RK, dx, parts, keys_T2, bands, tables.rows,
            signed(salt), K, stride, width, T, band, threshold, first, rank,
        )  # fmt: skip
        key = ("inputs", packed.shape, stride, keys_T2 is None, tma, with_dx, with_dA, dx is None, parts is None)
        if not launched(segments.sites, key, args):
            launch(
                gradient_kernels.inputs_kernel, (_cdiv(K, BK), segments.counts[band], blocks if with_dA else 1), args, segments.sites,
                key,
                ALONE=alone is not None, TMA=tma, DROP=segments.dropout, ASM=packed_dropout(x_TK), NEED_DX=with_dx,
                NEED_DA=with_dA, PRECISION="ieee", BM=size.inputs_m, BK=BK, BR=BR, STAGES=stages,
                num_warps=size.inputs_warps, num_stages=1,
            )  # fmt: skip
    if parts is not None:
        dA = torch.empty(layout.num_rows, K, dtype=dtype, device=device)
        sum_args = (
            parts,
            dA,
            bands,
            segments.ranges[band],
            tables.owners,
            None,
            None,
            K,
            width,
            segments.counts[band],
            first,
        )
        sum_key = ("sum_rows", packed.shape, dtype, band)
        if not launched(segments.sites, sum_key, sum_args):
            launch(
                gradient_kernels.sum_rows_kernel, (_cdiv(K, 512), layout.num_rows if alone is None else rank), sum_args,
                segments.sites, sum_key,
                ALONE=alone is not None, MAGNITUDE=False, OF_Y=False, BANDS=4, BK=512, num_warps=4, num_stages=1,
            )  # fmt: skip
    return dx, dA


# --- the fused product -------------------------------------------------------------------------------------------------


def fusable(x_TK: torch.Tensor, layers: Sequence[Layer]) -> bool:
    """Whether fused_kernel takes these: a GPU with Hopper's copy engine, 16 bits, aligned rows."""
    return (
        x_TK.element_size() == 2 and has_copy_engine(x_TK.device) and x_TK.shape[1] % 16 == 0 and x_TK.is_contiguous()
        and x_TK.data_ptr() % 16 == 0
        and all(
            layer.weight.shape[0] % 16 == 0 and layer.weight.is_contiguous() and layer.weight.data_ptr() % 16 == 0
            for layer in layers
        )
    )  # fmt: skip


@dataclass(slots=True)
class _LowRank:
    """The low-rank part of a fused product. rank: of the one adapter that owns all tokens. Else places has those of all, of
    which the largest is `largest`, and `last` is the row of g of tokens without an adapter."""

    L: torch.Tensor
    R: torch.Tensor
    rank: int = 0
    places: torch.Tensor | None = None
    largest: int = 0
    last: int = 0


@lru_cache(maxsize=4096)
def _tile(T: int, Q: int, slots: int) -> tuple[int, int, int]:
    """Columns, warps and stages of the tiles that take the least time in all turns of the processors."""

    def turns(columns: int) -> int:
        return _cdiv(_cdiv(T, FUSED_M) * _cdiv(Q, columns), slots)

    columns, warps, stages, _ = min(FUSED_TILES, key=lambda tile: turns(tile[0]) * tile[3])
    return columns, warps, stages


def _fused(
    segments: SegmentTables, of: Hashable, X: torch.Tensor, V: torch.Tensor, Y: torch.Tensor, low: _LowRank, forward: bool,
    bias: torch.Tensor | None = None, keys_T2: torch.Tensor | None = None, salt: int = 0, p: float = 0.0,
    g: torch.Tensor | None = None, Z: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`of` stands for the sizes and dtypes of all operands."""
    (T, P), Q, L = X.shape, Y.shape[1], low.L
    BM, BK = FUSED_M, FUSED_K
    BN, warps, stages = _tile(T, Q, processors(X.device))
    several = low.places is not None
    BR = 32 if several else _block(low.rank, 64)
    wide = BR > 16 and not several
    left: Descriptor | torch.Tensor = L
    right: Descriptor | torch.Tensor = low.R
    if wide:
        rank = low.rank
        left = Descriptor(L, [BM, BR], [T, rank], [L.stride(0), 1])
        if forward:
            right = Descriptor(low.R, [BN, BR], [Q, rank], [rank, 1])
        else:
            right = Descriptor(low.R, [BR, BN], [rank, Q], [Q, 1])
    args = (
        Descriptor(X, [BM, BK]), Descriptor(V, [BN, BK] if forward else [BK, BN]), Descriptor(Y, [BM, BN]),
        None if Z is None else Descriptor(Z, [BM, BN]), left, right, bias, g, keys_T2, segments.whole if several else None,
        segments.spans if several else None, low.places, signed(salt), dropout_threshold(p), T, P, Q, L.stride(0),
        low.last if several else low.rank,
    )  # fmt: skip
    key = ("fused", of, forward, several, _dtype(bias), g is None, keys_T2 is None, Z is None)
    if not launched(segments.sites, key, args):
        programs = min(processors(X.device), _cdiv(T, BM) * _cdiv(Q, BN))
        launch(
            fused.fused_kernel, (programs,), args, segments.sites, key,
            FORWARD=forward, DROP=keys_T2 is not None and (segments.dropout if several else p > 0), ASM=packed_dropout(Y),
            HAS_BIAS=bias is not None, HAS_G=g is not None, KEEP=Z is not None, WIDE=wide, SEGMENTS=several,
            DTYPE=getattr(tl, str(Y.dtype).removeprefix("torch.")),
            BM=BM, BN=BN, BK=BK, BR=BR, GROUP=8, PROGRAMS=programs, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return Y


def _of_layer(
    S: torch.Tensor, packed: Packed, tables: GroupTables, alone: Segment | None, index: int, last: int = 0
) -> _LowRank:
    """S B' of one layer. alone: the segment that has all tokens and an adapter on the layer, if one does."""
    if alone is None:
        flat = packed.B[index]
        assert flat is not None
        return _LowRank(S, flat, 0, tables.places[index], packed.layout.max_padded[index], last)
    place = packed.layout.places[alone.adapter, index]
    return _LowRank(S[:, place.column :], packed.b_block(alone.adapter, index), place.padded)


def up_fused(
    x_TK: torch.Tensor, S: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, alone: Segment | None, index: int,
    layer: Layer,
) -> torch.Tensor:  # fmt: skip
    """y [T, N] of one layer."""
    y = torch.empty(x_TK.shape[0], packed.layout.sizes[index], dtype=x_TK.dtype, device=x_TK.device)
    low = _of_layer(S, packed, tables, alone, index)
    return _fused(segments, (packed.shape, index), x_TK, layer.weight, y, low, True, layer.bias)


def up_fused_composed(
    x_TK: torch.Tensor, S: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables, alone: Segment | None, index: int,
    layer: Layer, composition: Composition, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """y [T, N] = g z + bias of one layer, and z where it is to be kept."""
    y = torch.empty(x_TK.shape[0], packed.layout.sizes[index], dtype=x_TK.dtype, device=x_TK.device)
    z = torch.empty_like(y) if keep else None
    low = _of_layer(S, packed, tables, alone, index, composition.adapters)
    g, bias = composition.g, composition.bias
    if alone is not None:
        g, bias = g[alone.adapter], None if bias is None else bias[alone.adapter]
    return _fused(segments, (packed.shape, index), x_TK, layer.weight, y, low, True, bias, g=g, Z=z), z


def dx_fused(
    d_TN: torch.Tensor, weight_NK: torch.Tensor, dS: torch.Tensor, packed: Packed, tables: GroupTables, segments: SegmentTables,
    alone: Segment | None, keys_T2: torch.Tensor | None, salt: int,
) -> torch.Tensor:  # fmt: skip
    """d W + drop(dS A), [T, K]."""
    dx = torch.empty(d_TN.shape[0], weight_NK.shape[1], dtype=d_TN.dtype, device=d_TN.device)
    if alone is None:
        low = _LowRank(dS, packed.A_RK, 0, tables.rows, packed.layout.width)
    else:
        first, padded = packed.layout.rows[alone.adapter]
        low = _LowRank(dS, packed.A_RK[first : first + padded], padded)
    p = 0.0 if alone is None else alone.dropout
    return _fused(segments, (packed.shape, weight_NK.shape[0]), d_TN, weight_NK, dx, low, False, None, keys_T2, salt, p)
