"""A group of frozen linear layers that read the same tokens, with the low-rank adapters on them, as one autograd node.

    y_j = x W_j' + s_j drop(x) A_j' B_j' + bias_j         for every layer j of the group and the token's own adapter

x is read once for the S of all layers, saved once, and gets one gradient. Saved beside it: S, [T, sum of the ranks]. No mask
and no dropped copy of x: all layers of a group share one mask, that of the tensor they read, recomputed from its counters.

This file owns the order of the work; the plan (plan.py) says whether a step is made of torch products or of a kernel
(kernels.py). DoRA is in chain.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from packlora.ops.dropout import dropout
from packlora.ops.lora_linear.layout import (
    GroupTables,
    Layer,
    Layout,
    LowRank,
    Packed,
    Recent,
    Run,
    RunTables,
    cover,
    make_group_tables,
    make_layout,
)
from packlora.ops.lora_linear.plan import CHAIN, Plan

__all__ = ["Layer", "LowRank", "Run", "lora_group"]

_LAYOUTS: Recent[Layout] = Recent(4096)
_GROUP_TABLES: Recent[tuple[GroupTables, torch.Tensor]] = Recent(4096)
_RUN_TABLES: Recent[RunTables] = Recent(64)


def lora_group(
    x_TK: torch.Tensor,
    layers: Sequence[Layer],
    runs: Sequence[Run],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
    plan: Plan = CHAIN,
    packed: dict[Any, Packed] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Outputs y [T, N] of every layer, in the dtype of x.

    A and B may be of a wider dtype than x: they are cast to x's for the products, x is never cast, and their gradients come
    back in their own dtype.

    Args:
        x_TK: tokens.
        layers: those that read them.
        runs: who owns which tokens; disjoint.
        keys_T2: dropout keys (ops.dropout.token_keys), needed where a run has dropout.
        salt: of the group (ops.dropout.layer_salt).
        plan: how to compute it.
        packed: a dict of the caller's in which packed operands are kept from call to call; parameters are then copied only
            when their version counters have moved. None copies them every time.

    Raises:
        ValueError: an operand does not fit; the message names it.
    """
    check(x_TK, layers, runs, keys_T2)
    flat: list[torch.Tensor] = []
    for layer in layers:
        for low in layer.adapters.values():
            flat += (low.A, low.B)
    outputs: tuple[torch.Tensor, ...] = _Group.apply(
        x_TK, tuple(layers), tuple(runs), keys_T2, salt, plan, packed, *flat
    )
    return outputs


class _Group(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        layers: tuple[Layer, ...],
        runs: tuple[Run, ...],
        keys_T2: torch.Tensor | None,
        salt: int,
        plan: Plan,
        cache: dict[Any, Packed] | None,
        *flat: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        packed = _pack(x_TK, layers, plan, cache)
        kernels = _Kernels(packed, layers, runs, x_TK, keys_T2, salt) if plan.needs_triton else None
        products = _Products(packed, layers, runs, x_TK, keys_T2, salt)
        S = kernels.down() if kernels and plan.down == "routed" else products.down()
        if kernels and plan.up == "routed":
            outputs = kernels.up(S)
        elif plan.up == "before":
            outputs = products.up_before(S)
        else:
            outputs = products.up_after(S)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TK, keys_T2, S if plan.keep_s else None, *(layer.weight for layer in layers), *flat)
        ctx.structure = [tuple((n, low.scaling) for n, low in layer.adapters.items()) for layer in layers]
        ctx.runs, ctx.salt, ctx.plan, ctx.packed = runs, salt, plan, packed
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x_TK, keys_T2, S, *tensors = ctx.saved_tensors
        layers, plan, packed = _rebuild(ctx.structure, tensors), ctx.plan, ctx.packed
        none = (None,) * (6 + 2 * sum(map(len, ctx.structure)))
        if all(grad is None for grad in d) or not any(ctx.needs_input_grad):
            return (None, *none)
        need_x, need_flat = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        need_A, need_B = any(need_flat[0::2]), any(need_flat[1::2])
        grads = [None if grad is None else grad.contiguous() for grad in d]
        kernels = _Kernels(packed, layers, ctx.runs, x_TK, keys_T2, ctx.salt) if plan.needs_triton else None
        products = _Products(packed, layers, ctx.runs, x_TK, keys_T2, ctx.salt)
        if S is None:
            S = kernels.down() if kernels and plan.down == "routed" else products.down()

        steps = kernels if kernels and plan.grad == "one-pass" else products
        dS, dB = steps.grad(grads, S, need_B)
        if kernels and plan.dx == "routed":
            dx, dA = kernels.inputs(dS, grads, need_x, need_A)
        else:
            dx, dA = products.inputs(dS, grads, need_x, need_A, first=plan.dx == "before")

        out: list[torch.Tensor | None] = []
        for index, layer in enumerate(layers):
            for number, low in layer.adapters.items():
                place = packed.layout.places[number, index]
                own_A = own_B = None
                if need_flat[len(out)] and grads[index] is not None:
                    first = packed.layout.rows[number][0] + place.column
                    own_A = dA[first : first + place.rank].to(low.A.dtype)
                if need_flat[len(out) + 1] and dB[index] is not None:
                    N = len(layer.weight)
                    block = dB[index][place.b_offset : place.b_offset + N * place.padded].view(N, place.padded)
                    own_B = block[:, : place.rank].to(low.B.dtype)
                out += (own_A, own_B)
        return (dx, *none[:6], *out)


def _rebuild(structure: list[tuple[tuple[int, float], ...]], tensors: list[torch.Tensor]) -> tuple[Layer, ...]:
    """The layers from what autograd kept: weights first, then A and B in order. Biases take no part in the backward."""
    weights, flat = tensors[: len(structure)], iter(tensors[len(structure) :])
    return tuple(
        Layer(weight, None, {number: LowRank(next(flat), next(flat), scaling) for number, scaling in own})
        for weight, own in zip(weights, structure, strict=True)
    )


def _pack(x_TK: torch.Tensor, layers: Sequence[Layer], plan: Plan, cache: dict[Any, Packed] | None) -> Packed:
    align = 16 if plan.needs_triton else 1
    key = tuple(
        (len(layer.weight), tuple((number, len(low.A)) for number, low in layer.adapters.items())) for layer in layers
    )
    layout = _LAYOUTS.get(
        (key, align),
        lambda: make_layout([dict(ranks) for _, ranks in key], [N for N, _ in key], align),
    )
    if cache is None:
        packed = Packed(layout, x_TK.shape[1], x_TK.dtype, x_TK.device)
    else:
        whole = (key, align, x_TK.dtype, x_TK.device)
        if whole not in cache:
            cache[whole] = Packed(layout, x_TK.shape[1], x_TK.dtype, x_TK.device, trusted=True)
        packed = cache[whole]
    packed.refresh(layers)
    return packed


class _Products:
    """The steps by torch products, run by run."""

    def __init__(
        self, packed: Packed, layers: Sequence[Layer], runs: Sequence[Run], x_TK: torch.Tensor,
        keys_T2: torch.Tensor | None, salt: int,
    ) -> None:  # fmt: skip
        self.packed, self.layers, self.x_TK, self.keys_T2, self.salt = packed, layers, x_TK, keys_T2, salt
        self.layout = packed.layout
        self.runs = [run for run in runs if self.layout.rows.get(run.adapter, (0, 0))[1]]
        self._dropped: list[torch.Tensor] | None = None

    def _A(self, run: Run) -> torch.Tensor:
        """The adapter's stacked A, [R, K]."""
        first, padded = self.layout.rows[run.adapter]
        return self.packed.A_RK[first : first + padded]

    def _xd(self, run: Run) -> torch.Tensor:
        return self._drop(self.x_TK[run.start : run.stop], run)

    def _drop(self, tokens: torch.Tensor, run: Run) -> torch.Tensor:
        if not run.dropout:
            return tokens
        assert self.keys_T2 is not None
        return dropout(tokens, self.keys_T2[run.start : run.stop], self.salt, run.dropout)

    def _of_layer(self, index: int) -> list[tuple[Run, slice, slice, torch.Tensor, float]]:
        """Per run with an adapter on this layer: tokens, columns of S, B [N, padded], scaling."""
        out = []
        for run in self.runs:
            place = self.layout.places.get((run.adapter, index))
            if place is not None:
                layer = self.layers[index]
                columns = slice(place.column, place.column + place.padded)
                B = self.packed.b_block(run.adapter, index, len(layer.weight))
                out.append((run, slice(run.start, run.stop), columns, B, layer.adapters[run.adapter].scaling))
        return out

    def down(self) -> torch.Tensor:
        S = self.x_TK.new_empty(len(self.x_TK), self.layout.width)
        for run in self.runs:
            A_RK = self._A(run)
            torch.mm(self._xd(run), A_RK.T, out=S[run.start : run.stop, : len(A_RK)])
        return S

    def up_after(self, S: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for index, layer in enumerate(self.layers):
            y_TN = torch.nn.functional.linear(self.x_TK, layer.weight, layer.bias)
            for _, rows, columns, B, scaling in self._of_layer(index):
                y_TN[rows].addmm_(S[rows, columns], B.T, alpha=scaling)
            outputs.append(y_TN)
        return outputs

    def up_before(self, S: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for index, layer in enumerate(self.layers):
            y_TN = self.x_TK.new_empty(len(self.x_TK), len(layer.weight))
            y_TN.zero_() if layer.bias is None else y_TN.copy_(layer.bias)
            for _, rows, columns, B, scaling in self._of_layer(index):
                y_TN[rows].addmm_(S[rows, columns], B.T, alpha=scaling)
            outputs.append(y_TN.addmm_(self.x_TK, layer.weight.T))
        return outputs

    def grad(
        self, grads: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        dS = torch.empty_like(S)
        out: list[torch.Tensor | None] = []
        for index, d_TN in enumerate(grads):
            dB = None
            if d_TN is not None and need_B:
                dB = S.new_zeros(self.layout.b_sizes[index])
            for run, rows, columns, B, scaling in self._of_layer(index):
                if d_TN is None:
                    dS[rows, columns] = 0
                    continue
                torch.addmm(dS[rows, columns], d_TN[rows], B, beta=0, alpha=scaling, out=dS[rows, columns])
                if dB is not None:
                    place, N = self.layout.places[run.adapter, index], d_TN.shape[1]
                    block = dB[place.b_offset : place.b_offset + N * place.padded].view(N, place.padded)
                    block.addmm_(d_TN[rows].T, S[rows, columns], alpha=scaling)
            out.append(dB)
        return dS, out

    def inputs(
        self, dS: torch.Tensor, grads: Sequence[torch.Tensor | None], need_x: bool, need_A: bool, first: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """first: the low-rank product is written before the base products accumulate onto it, not after them."""
        dx = dA = None
        if need_A:
            dA = torch.zeros_like(self.packed.A_RK)
            for run in self.runs:
                at, padded = self.layout.rows[run.adapter]
                dA[at : at + padded].addmm_(dS[run.start : run.stop, :padded].T, self._xd(run))
        if need_x:
            if first:
                dx = torch.zeros_like(self.x_TK)
                self._add_low_rank(dx, dS)
            for layer, d_TN in zip(self.layers, grads, strict=True):
                if d_TN is not None:
                    dx = d_TN @ layer.weight if dx is None else dx.addmm_(d_TN, layer.weight)
            assert dx is not None
            if not first:
                self._add_low_rank(dx, dS)
        return dx, dA

    def _add_low_rank(self, dx: torch.Tensor, dS: torch.Tensor) -> None:
        for run in self.runs:
            A_RK, rows = self._A(run), slice(run.start, run.stop)
            if run.dropout:
                dx[rows] += self._drop(dS[rows, : len(A_RK)] @ A_RK, run)
            else:
                dx[rows].addmm_(dS[rows, : len(A_RK)], A_RK)


class _Kernels:
    """The steps by the kernels. Tables are made once per group and once per set of runs, not per call."""

    def __init__(
        self, packed: Packed, layers: Sequence[Layer], runs: tuple[Run, ...], x_TK: torch.Tensor,
        keys_T2: torch.Tensor | None, salt: int,
    ) -> None:  # fmt: skip
        from packlora.ops.lora_linear import launch

        self.launch, self.packed, self.layers = launch, packed, layers
        self.x_TK, self.keys_T2, self.salt = x_TK, keys_T2, salt
        T, device = len(x_TK), x_TK.device
        self.runs = _RUN_TABLES.get(
            (runs, T, device, x_TK.dtype == torch.float32),
            lambda: RunTables(runs, T, device, launch.sizes_for(x_TK.dtype).tokens),
        )
        scalings = {
            (number, index): low.scaling for index, layer in enumerate(layers) for number, low in layer.adapters.items()
        }
        num = 1 + max([run.adapter for run in runs] + list(packed.layout.rows), default=-1)
        key = (packed.layout.rows.items().__repr__(), tuple(packed.layout.places.items()), tuple(scalings.items()), num, device)
        self.tables, self.row_table = _GROUP_TABLES.get(
            key,
            lambda: (
                make_group_tables(packed.layout, scalings, num, device),
                launch.row_table(packed.layout, device),
            ),
        )

    def down(self) -> torch.Tensor:
        return self.launch.down(self.x_TK, self.packed, self.tables, self.runs, self.keys_T2, self.salt)

    def up(self, S: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.launch.up(S, self.packed, self.tables, self.runs, self.layers)
        for y_TN, layer in zip(outputs, self.layers, strict=True):
            y_TN.addmm_(self.x_TK, layer.weight.T)
        return outputs

    def grad(
        self, grads: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        return self.launch.grad(grads, S, self.packed, self.tables, self.runs, self._wide(), need_B)

    def inputs(
        self, dS: torch.Tensor, grads: Sequence[torch.Tensor | None], need_x: bool, need_A: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx, dA = self.launch.inputs(
            self.x_TK, dS, self.packed, self.tables, self.runs, self.row_table, self.keys_T2, self.salt, self._wide(),
            need_x, need_A,
        )  # fmt: skip
        if dx is not None:
            for layer, d_TN in zip(self.layers, grads, strict=True):
                if d_TN is not None:
                    dx.addmm_(d_TN, layer.weight)
        return dx, dA

    def _wide(self) -> torch.dtype:
        """What gradients are written in: the parameters' dtype where all agree, else float32."""
        dtypes = {t.dtype for layer in self.layers for low in layer.adapters.values() for t in (low.A, low.B)}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32


def check(
    x_TK: torch.Tensor, layers: Sequence[Layer], runs: Sequence[Run], keys_T2: torch.Tensor | None
) -> None:
    """Raise ValueError, naming the operand, for shapes, dtypes and devices that do not fit."""
    if x_TK.ndim != 2 or not x_TK.is_floating_point() or x_TK.stride(1) != 1:
        raise ValueError(
            f"x must be a float tensor [T, K] with contiguous rows; got {tuple(x_TK.shape)} {x_TK.dtype}, strides {x_TK.stride()}"
        )
    T, K = x_TK.shape
    for index, layer in enumerate(layers):
        weight = layer.weight
        if weight.ndim != 2 or weight.shape[1] != K or weight.dtype != x_TK.dtype or weight.device != x_TK.device:
            raise ValueError(
                f"weight of layer {index} must be [N, {K}] {x_TK.dtype} on {x_TK.device}; got {tuple(weight.shape)} "
                f"{weight.dtype} on {weight.device}"
            )
        N = len(weight)
        if layer.bias is not None and tuple(layer.bias.shape) != (N,):
            raise ValueError(f"bias of layer {index} must be [{N}]; got {tuple(layer.bias.shape)}")
        for number, low in layer.adapters.items():
            rank = len(low.A)
            for name, operand, shape in (("A", low.A, (rank, K)), ("B", low.B, (N, rank))):
                if tuple(operand.shape) != shape or operand.device != x_TK.device or not rank:
                    raise ValueError(
                        f"{name} of adapter {number} on layer {index} must be {shape}, rank 1 or more, on {x_TK.device}; got "
                        f"{tuple(operand.shape)} on {operand.device}"
                    )
    end = 0
    for run in sorted(runs, key=lambda run: run.start):
        if not end <= run.start < run.stop <= T or run.adapter < 0:
            raise ValueError(
                f"run {run.start}:{run.stop} of adapter {run.adapter} overlaps another, is empty or leaves the {T} tokens"
            )
        end = run.stop
        if run.dropout and (keys_T2 is None or tuple(keys_T2.shape) != (T, 2) or keys_T2.dtype != torch.int32):
            found = None if keys_T2 is None else f"{tuple(keys_T2.shape)} {keys_T2.dtype}"
            raise ValueError(f"dropout needs keys [{T}, 2] int32, got {found}")


def _gaps(runs: Sequence[Run], num_tokens: int) -> list[tuple[int, int]]:
    return [(start, stop) for adapter, start, stop, _ in cover(runs, num_tokens) if adapter < 0]
