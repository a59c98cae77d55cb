"""A group of frozen linear layers that read the same tokens, with the low-rank adapters on them, as one autograd node.

    y_j = x W_j' + s_j drop(x) A_j' B_j' + bias_j         for every layer j of the group and the token's own adapter

x is read once for the S of all layers, saved once, and gets one gradient. Saved beside it: S, [T, sum of the ranks]. No mask
and no dropped copy of x: all layers of a group share one mask, that of the tensor they read, recomputed from its counters.

This file owns the order of the work; the plan (plan.py) says whether a step is made of torch products or of a kernel
(kernels.py). Plans for one adapter that merge weights or associate otherwise are in products.py, DoRA is in chain.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from packlora.ops.dropout import dropout, dropout_factor
from packlora.ops.lora_linear.layout import (
    Layer,
    Layout,
    LowRank,
    Packed,
    Recent,
    Run,
    RunTables,
    make_group_tables,
    make_layout,
)
from packlora.ops.lora_linear.plan import CHAIN, Plan

__all__ = ["GroupState", "Layer", "LowRank", "Run", "lora_group"]

_LAYOUTS: Recent[Layout] = Recent(4096)
_RUN_TABLES: Recent[RunTables] = Recent(64)
HAS_TRITON = importlib.util.find_spec("triton") is not None


class GroupState:
    """What one caller keeps between its calls: packed operands and tables of the layers that it last passed.

    trusted: parameters change only in ways that move their version counters (torch's optimizers, in-place operations), so
    packed copies are refreshed only then. Otherwise they are refreshed at every call.
    """

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self._prepared: dict[bool, Prepared] = {}

    def prepared(self, x_TK: torch.Tensor, layers: tuple[Layer, ...], plan: Plan) -> Prepared:
        kernels = plan.needs_triton
        found = self._prepared.get(kernels)
        if found is None or not found.fits(x_TK, layers):
            found = self._prepared[kernels] = Prepared(x_TK, layers, kernels, self.trusted)
        return found


class Prepared:
    """Checked layers with their layout, packed operands and tables."""

    def __init__(self, x_TK: torch.Tensor, layers: tuple[Layer, ...], kernels: bool, trusted: bool) -> None:
        check_layers(x_TK, layers)
        self.layers, self.dtype, self.device, self.K = layers, x_TK.dtype, x_TK.device, x_TK.shape[1]
        ranks = tuple(tuple((number, len(low.A)) for number, low in layer.adapters.items()) for layer in layers)
        sizes = tuple(len(layer.weight) for layer in layers)
        align = 16 if kernels else 1
        self.layout = _LAYOUTS.get(
            (ranks, sizes, align), lambda: make_layout([dict(own) for own in ranks], sizes, align)
        )
        self.packed = Packed(self.layout, self.K, x_TK.dtype, x_TK.device, trusted)
        self.flat = tuple(t for layer in layers for low in layer.adapters.values() for t in (low.A, low.B))
        dtypes = {t.dtype for t in self.flat}
        self.wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
        """What kernels write gradients in: the parameters' dtype where all agree."""
        self.num_adapters = 1 + max(self.layout.rows, default=-1)
        if kernels:
            scalings = {(n, j): low.scaling for j, layer in enumerate(layers) for n, low in layer.adapters.items()}
            self.tables = make_group_tables(self.layout, scalings, self.num_adapters, self.device)

    def fits(self, x_TK: torch.Tensor, layers: tuple[Layer, ...]) -> bool:
        """Whether these are the layers that it was made for, the very objects."""
        if x_TK.dtype != self.dtype or x_TK.device != self.device or x_TK.shape[1] != self.K:
            return False
        if layers is self.layers:
            return True
        return len(layers) == len(self.layers) and all(
            new.weight is old.weight and new.bias is old.bias and new.adapters.keys() == old.adapters.keys()
            and all(
                low.A is old.adapters[n].A and low.B is old.adapters[n].B and low.scaling == old.adapters[n].scaling
                for n, low in new.adapters.items()
            )
            for new, old in zip(layers, self.layers, strict=True)
        )  # fmt: skip


def lora_group(
    x_TK: torch.Tensor,
    layers: Sequence[Layer],
    runs: Sequence[Run],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
    plan: Plan = CHAIN,
    state: GroupState | None = None,
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
        state: kept by the caller from call to call, so that unchanged layers are not checked and packed again.

    Raises:
        ValueError: an operand does not fit; the message names it.
    """
    layers, runs = tuple(layers), tuple(runs)
    check_tokens(x_TK, runs, keys_T2)
    prepared = (state or GroupState()).prepared(x_TK, layers, plan)
    if "merged" in (plan.up, plan.dx) or "xd" in (plan.dA, plan.dB):
        from packlora.ops.lora_linear.products import lora_group_products

        if len(runs) != 1 or runs[0].start or runs[0].stop != x_TK.shape[0]:
            raise ValueError(f"plan {plan.name} is for one adapter that owns all tokens; got runs {runs}")
        return lora_group_products(x_TK, layers, runs[0].adapter, keys_T2, runs[0].dropout, salt, plan)
    if plan.needs_triton and not HAS_TRITON:
        raise ValueError(f"plan {plan.name} needs triton, which is not installed")
    prepared.packed.refresh(layers)
    outputs: tuple[torch.Tensor, ...] = _Group.apply(x_TK, prepared, runs, keys_T2, salt, plan, *prepared.flat)
    return outputs


class _Group(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, prepared: Prepared, runs: tuple[Run, ...], keys_T2: torch.Tensor | None, salt: int,
        plan: Plan, *flat: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        outputs, S = group_forward(prepared, x_TK, runs, keys_T2, salt, plan)
        ctx.set_materialize_grads(False)
        # A and B for autograd's own check that nobody changes them before the backward
        ctx.save_for_backward(x_TK, keys_T2, S if plan.keep_s else None, *flat)
        ctx.prepared, ctx.runs, ctx.salt, ctx.plan = prepared, runs, salt, plan
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x_TK, keys_T2, S, *flat = ctx.saved_tensors
        need_flat = ctx.needs_input_grad[6:]
        if all(grad is None for grad in d) or not any(ctx.needs_input_grad):
            return (None,) * (6 + len(flat))
        dx, grads = group_backward(
            ctx.prepared, x_TK, S, d, ctx.runs, keys_T2, ctx.salt, ctx.plan, ctx.needs_input_grad[0], need_flat
        )
        return (dx, None, None, None, None, None, *grads)


def group_forward(
    prepared: Prepared, x_TK: torch.Tensor, runs: tuple[Run, ...], keys_T2: torch.Tensor | None, salt: int, plan: Plan
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of the layers, and S [T, width] for the backward."""
    steps = _steps(prepared, x_TK, runs, keys_T2, salt, plan)
    S = steps.down()
    return steps.up(S, plan.up), S


def group_backward(
    prepared: Prepared, x_TK: torch.Tensor, S: torch.Tensor | None, d: Sequence[torch.Tensor | None], runs: tuple[Run, ...],
    keys_T2: torch.Tensor | None, salt: int, plan: Plan, need_x: bool, need_flat: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """dx, and the gradients of A and B in the order of `prepared.flat`, None where not needed."""
    steps = _steps(prepared, x_TK, runs, keys_T2, salt, plan)
    grads = [None if grad is None else grad.contiguous() for grad in d]
    if S is None:
        S = steps.down()
    present = {run.adapter for run in runs}
    need_A, need_B = any(need_flat[0::2]), any(need_flat[1::2])
    dS, dB = steps.grad(grads, S, need_B, plan.grad)
    dx, dA = steps.inputs(dS, grads, need_x, need_A, plan.dx)
    out: list[torch.Tensor | None] = []
    for index, layer in enumerate(prepared.layers):
        for number, low in layer.adapters.items():
            own_A = own_B = None
            if number not in present:  # no gradient, rather than one of zeros
                out += (None, None)
                continue
            place = prepared.layout.places[number, index]
            if need_flat[len(out)] and grads[index] is not None and dA is not None:
                first = prepared.layout.rows[number][0] + place.column
                own_A = dA[first : first + place.rank]
            if need_flat[len(out) + 1] and (flat_B := dB[index]) is not None:
                block = flat_B[place.b_offset : place.b_offset + layer.weight.shape[0] * place.padded]
                own_B = block.view(-1, place.padded)[:, : place.rank]
            out.append(None if own_A is None else own_A.to(low.A.dtype))
            out.append(None if own_B is None else own_B.to(low.B.dtype))
    return dx, out


def _steps(
    prepared: Prepared, x_TK: torch.Tensor, runs: tuple[Run, ...], keys_T2: torch.Tensor | None, salt: int, plan: Plan
) -> _Products | _Kernels:
    owned = any(prepared.layout.rows.get(run.adapter, (0, 0))[1] for run in runs)
    make = _Kernels if plan.needs_triton and owned else _Products
    return make(prepared, x_TK, runs, keys_T2, salt)


class _Products:
    """The steps by torch products, run by run. S here is without the scaling, dS with it."""

    def __init__(
        self, prepared: Prepared, x_TK: torch.Tensor, runs: tuple[Run, ...], keys_T2: torch.Tensor | None, salt: int
    ) -> None:
        self.prepared, self.packed, self.layers, self.layout = (
            prepared,
            prepared.packed,
            prepared.layers,
            prepared.layout,
        )
        self.x_TK, self.keys_T2, self.salt = x_TK, keys_T2, salt
        self.runs = [run for run in runs if self.layout.rows.get(run.adapter, (0, 0))[1]]

    def _A(self, run: Run) -> torch.Tensor:
        """The adapter's stacked A, [R, K]."""
        first, padded = self.layout.rows[run.adapter]
        return self.packed.A_RK[first : first + padded]

    def _drop(self, tokens: torch.Tensor, run: Run) -> torch.Tensor:
        if not run.dropout:
            return tokens
        assert self.keys_T2 is not None
        return dropout(tokens, self.keys_T2[run.start : run.stop], self.salt, run.dropout)

    def _of_layer(self, index: int) -> list[tuple[Run, slice, slice, torch.Tensor, float]]:
        """Per run with an adapter on this layer: tokens, columns of S, B [N, padded], scaling."""
        layer, out = self.layers[index], []
        for run in self.runs:
            place = self.layout.places.get((run.adapter, index))
            if place is not None:
                B = self.packed.b_block(run.adapter, index, len(layer.weight))
                columns = slice(place.column, place.column + place.padded)
                out.append((run, slice(run.start, run.stop), columns, B, layer.adapters[run.adapter].scaling))
        return out

    def down(self) -> torch.Tensor:
        S = self.x_TK.new_empty(len(self.x_TK), self.layout.width)
        for run in self.runs:
            A_RK = self._A(run)
            torch.mm(self._drop(self.x_TK[run.start : run.stop], run), A_RK.T, out=S[run.start : run.stop, : len(A_RK)])
        return S

    def up(self, S: torch.Tensor, way: str) -> list[torch.Tensor]:
        outputs = []
        for index, layer in enumerate(self.layers):
            if way == "before":
                y_TN = self.x_TK.new_empty(len(self.x_TK), len(layer.weight))
                for _, rows, columns, B, scaling in self._of_layer(index):
                    write_mm(y_TN[rows], S[rows, columns], B.T, scaling, layer.bias)
                for start, stop in gaps([run for run, *_ in self._of_layer(index)], len(y_TN)):
                    y_TN[start:stop] = 0 if layer.bias is None else layer.bias
                y_TN.addmm_(self.x_TK, layer.weight.T)
            else:
                y_TN = linear(self.x_TK, layer.weight, layer.bias)
                for _, rows, columns, B, scaling in self._of_layer(index):
                    y_TN[rows].addmm_(S[rows, columns], B.T, alpha=scaling)
            outputs.append(y_TN)
        return outputs

    def grad(
        self, grads: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool, way: str
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        dS = torch.empty_like(S)
        out: list[torch.Tensor | None] = []
        for index, d_TN in enumerate(grads):
            dB = S.new_zeros(self.layout.b_sizes[index]) if d_TN is not None and need_B else None
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
        self, dS: torch.Tensor, grads: Sequence[torch.Tensor | None], need_x: bool, need_A: bool, way: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx = dA = None
        if need_A:
            dA = self.x_TK.new_zeros(self.layout.num_rows, self.x_TK.shape[1])
            for run in self.runs:
                at, padded = self.layout.rows[run.adapter]
                rows = slice(run.start, run.stop)
                dA[at : at + padded].addmm_(dS[rows, :padded].T, self._drop(self.x_TK[rows], run))
        if need_x:
            if way == "before":
                dx = torch.empty_like(self.x_TK)
                for run in self.runs:
                    A_RK, rows = self._A(run), slice(run.start, run.stop)
                    if run.dropout:
                        dx[rows] = self._drop(dS[rows, : len(A_RK)] @ A_RK, run)
                    else:
                        torch.mm(dS[rows, : len(A_RK)], A_RK, out=dx[rows])
                for start, stop in gaps(self.runs, len(dx)):
                    dx[start:stop] = 0
            for layer, d_TN in zip(self.layers, grads, strict=True):
                if d_TN is not None:
                    dx = d_TN @ layer.weight if dx is None else dx.addmm_(d_TN, layer.weight)
            assert dx is not None
            if way != "before":
                for run in self.runs:
                    A_RK, rows = self._A(run), slice(run.start, run.stop)
                    if run.dropout:
                        dx[rows] += self._drop(dS[rows, : len(A_RK)] @ A_RK, run)
                    else:
                        dx[rows].addmm_(dS[rows, : len(A_RK)], A_RK)
        return dx, dA


def write_mm(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0, bias: torch.Tensor | None = None
) -> None:
    """out = scale a b + bias, written and not read."""
    if bias is not None:
        torch.addmm(bias, a, b, alpha=scale, out=out)
    elif scale == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


def gaps(runs: Sequence[Run], num_tokens: int) -> list[tuple[int, int]]:
    """Tokens that no run owns."""
    out, end = [], 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start > end:
            out.append((end, run.start))
        end = run.stop
    return out if end == num_tokens else [*out, (end, num_tokens)]


class _Kernels:
    """The steps by the kernels around torch's base products. S and dS are as kernels.py has them, with all factors in."""

    def __init__(
        self, prepared: Prepared, x_TK: torch.Tensor, runs: tuple[Run, ...], keys_T2: torch.Tensor | None, salt: int
    ) -> None:
        from packlora.ops.lora_linear import launch

        self.launch, self.prepared, self.packed, self.layers = launch, prepared, prepared.packed, prepared.layers
        self.x_TK, self.keys_T2, self.salt, self.own = x_TK, keys_T2, salt, runs
        T, device, single = x_TK.shape[0], x_TK.device, x_TK.dtype == torch.float32
        if any(run.adapter >= prepared.num_adapters for run in runs):  # adapters that no layer of the group has
            runs = tuple(run for run in runs if run.adapter < prepared.num_adapters)
        self.runs = _RUN_TABLES.get(
            (runs, T, device, single, prepared.num_adapters),
            lambda: RunTables(runs, T, device, launch.sizes_for(x_TK.dtype).tokens, prepared.num_adapters),
        )

    def down(self) -> torch.Tensor:
        return self.launch.down(self.x_TK, self.packed, self.prepared.tables, self.runs, self.keys_T2, self.salt)

    def up(self, S: torch.Tensor, way: str) -> list[torch.Tensor]:
        fused = way == "fused" and self.launch.fusable(self.x_TK, self.layers, self.own)
        outputs = []
        for index, layer in enumerate(self.layers):
            if fused:
                y_TN = self.launch.up_fused(self.x_TK, S, self.packed, self.own[0], index, layer)
            elif self.x_TK.dtype == torch.float32:  # its product rounds more when it accumulates onto something
                y_TN = linear(self.x_TK, layer.weight, layer.bias)
                bare = Layer(layer.weight, None, layer.adapters)
                y_TN += self.launch.up(S, self.packed, self.prepared.tables, self.runs, index, bare)
            elif way == "before":
                y_TN = self._low_rank(S, index, layer).addmm_(self.x_TK, layer.weight.T)
            else:
                y_TN = self.launch.up(S, self.packed, self.prepared.tables, self.runs, index, layer)
                y_TN.addmm_(self.x_TK, layer.weight.T)
            outputs.append(y_TN)
        return outputs

    def _low_rank(self, S: torch.Tensor, index: int, layer: Layer) -> torch.Tensor:
        """S B' + bias, [T, N], by a product for every run."""
        N, owned = len(layer.weight), []
        y_TN = self.x_TK.new_empty(len(S), N)
        for run in self.own:
            place = self.packed.layout.places.get((run.adapter, index))
            if place is not None:
                owned.append(run)
                rows, columns = slice(run.start, run.stop), slice(place.column, place.column + place.padded)
                write_mm(y_TN[rows], S[rows, columns], self.packed.b_block(run.adapter, index, N).T, 1.0, layer.bias)
        for start, stop in gaps(owned, len(S)):
            y_TN[start:stop] = 0 if layer.bias is None else layer.bias
        return y_TN

    def grad(
        self, grads: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool, way: str
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        if way == "mm":
            return self._grad_by_products(grads, S, need_B)
        return self.launch.grad(grads, S, self.packed, self.prepared.tables, self.runs, self.prepared.wide, need_B)

    def _grad_by_products(
        self, grads: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        layout, dS = self.packed.layout, torch.empty_like(S)
        out: list[torch.Tensor | None] = []
        for index, d_TN in enumerate(grads):
            dB = S.new_zeros(layout.b_sizes[index]) if d_TN is not None and need_B else None
            for run in self.own:
                place = layout.places.get((run.adapter, index))
                if place is None:
                    continue
                rows, columns = slice(run.start, run.stop), slice(place.column, place.column + place.padded)
                if d_TN is None:
                    dS[rows, columns] = 0
                    continue
                N, scaling = d_TN.shape[1], self.layers[index].adapters[run.adapter].scaling
                B = self.packed.b_block(run.adapter, index, N)
                factor = scaling * dropout_factor(run.dropout)
                torch.addmm(dS[rows, columns], d_TN[rows], B, beta=0, alpha=factor, out=dS[rows, columns])
                if dB is not None:
                    block = dB[place.b_offset : place.b_offset + N * place.padded].view(N, place.padded)
                    block.addmm_(d_TN[rows].T, S[rows, columns])
            out.append(dB)
        return dS, out

    def inputs(
        self, dS: torch.Tensor, grads: Sequence[torch.Tensor | None], need_x: bool, need_A: bool, way: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        fused = way == "fused" and self.launch.fusable(self.x_TK, self.layers, self.own)
        dx, dA = self.launch.inputs(
            self.x_TK, dS, self.packed, self.prepared.tables, self.runs, self.keys_T2, self.salt, self.prepared.wide,
            need_x and not fused, need_A,
        )  # fmt: skip
        if need_x:
            for layer, d_TN in zip(self.layers, grads, strict=True):
                if d_TN is None:
                    continue
                if dx is None:
                    dx = self.launch.dx_fused(d_TN, layer.weight, dS, self.packed, self.own[0], self.keys_T2, self.salt)
                else:
                    dx.addmm_(d_TN, layer.weight)
        return dx, dA


def check_tokens(x_TK: torch.Tensor, runs: Sequence[Run], keys_T2: torch.Tensor | None) -> None:
    """Raise ValueError, naming the operand, where x, the runs or the keys do not fit."""
    if x_TK.ndim != 2 or not x_TK.is_floating_point() or x_TK.stride(1) != 1:
        raise ValueError(
            f"x must be a float tensor [T, K] with contiguous rows; got {tuple(x_TK.shape)} {x_TK.dtype}, strides "
            f"{x_TK.stride()}"
        )
    T, end = x_TK.shape[0], 0
    for run in runs if len(runs) < 2 else sorted(runs, key=lambda run: run.start):
        if not end <= run.start < run.stop <= T or run.adapter < 0:
            raise ValueError(
                f"run {run.start}:{run.stop} of adapter {run.adapter} overlaps another, is empty or leaves the {T} tokens"
            )
        end = run.stop
        if run.dropout and (keys_T2 is None or tuple(keys_T2.shape) != (T, 2) or keys_T2.dtype != torch.int32):
            found = None if keys_T2 is None else f"{tuple(keys_T2.shape)} {keys_T2.dtype}"
            raise ValueError(f"dropout needs keys [{T}, 2] int32, got {found}")


def check_layers(x_TK: torch.Tensor, layers: Sequence[Layer]) -> None:
    """Raise ValueError, naming the operand, for shapes, dtypes and devices that do not fit."""
    K = x_TK.shape[1]
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
