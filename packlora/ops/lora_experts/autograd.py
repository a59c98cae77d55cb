"""The operator over the weights of all experts, for autograd.

    y_s = W_e x_s + (g - 1) * W_e xb_s + g * s B_e A_e xd_s + bias_e         xd = drop(x); xb is xd or x, see base_dropped

for every row s, that is for every expert e here that a token goes to; A, B and g are those of the owner of the token. Rows
are sorted by (expert, owner), so every product is a grouped one, and nothing of W's size is made. With d = dL/dy and e = g * d:

    dS = s e B      dB = s e' S      dA = dS' xd      dm = (sum of d * z) / norm      z = W xb + s S B'
    dx = d W + drop'((g - 1) * d W + dS A)

Kept for the backward are x, before it is repeated for every expert of a token, S [S, r], and z where a magnitude is trained.

Shapes: T tokens, S rows, E experts, J owners, G = E J groups, N outputs, K inputs, r the largest rank, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.lora_experts import low_rank
from packlora.ops.lora_experts.dropout import dropped_rows, expert_keys
from packlora.ops.lora_experts.grouped import rows_times, sums_of_rows
from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_experts.types import ExpertLowRank, ExpertWeight, a_by_expert, b_by_expert

FIELDS = 3
"""Tensors of an adapter in the node's arguments: A, B, magnitude."""


def lora_experts(
    x: torch.Tensor,
    frozen: ExpertWeight,
    routing: Routing,
    adapters: Sequence[ExpertLowRank | None] = (None,),
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
    repeated: bool = True,
) -> torch.Tensor:
    """y [S, N] of the sorted rows, in the dtype of x.

    A and B may be of a wider dtype than x: they are cast to x's for the products; their gradients come back in their own.

    Args:
        x: what tokens bring, [T, K], where it is `repeated` for every expert of a token; else sorted rows [S, K].
        adapters: of each owner in `routing`; None: the frozen experts alone.
        keys_T2: dropout keys of the tokens, needed where an adapter has dropout.
        salt: of the experts.

    Raises:
        ValueError: an operand does not fit; the message names it.
    """
    E, N, K = frozen.shape
    rows = routing.tokens if repeated else len(routing.order)
    if x.shape != (rows, K):
        raise ValueError(f"x is {list(x.shape)}, experts of [{E}, {N}, {K}] need {[rows, K]}")
    if len(adapters) != routing.owners:
        raise ValueError(f"there are {len(adapters)} adapters for {routing.owners} owners")
    for adapter in adapters:
        if adapter is None:
            continue
        r = adapter.rank(E)
        if adapter.A.shape != (E * r, K) or adapter.B.shape != (N, E * r):
            raise ValueError(
                f"A is {list(adapter.A.shape)}, B {list(adapter.B.shape)}: experts of [{E}, {N}, {K}] need [E r, K], [N, r E]"
            )
        if adapter.magnitude is not None and adapter.norm is None:
            raise ValueError("a magnitude needs its norm")
        if adapter.dropout and keys_T2 is None:
            raise ValueError("dropout needs keys_T2")
    call = Call(frozen, routing, tuple(adapters), keys_T2, salt, repeated, x.dtype)
    flat = [t for a in adapters for t in ((None,) * FIELDS if a is None else (a.A, a.B, a.magnitude))]
    out: torch.Tensor = LoraExperts.apply(x, call, *flat)
    return out


@dataclass(frozen=True, slots=True)
class Call:
    """Operands and settings of one call, without the tensors that autograd saves."""

    frozen: ExpertWeight
    routing: Routing
    adapters: tuple[ExpertLowRank | None, ...]
    keys_T2: torch.Tensor | None
    salt: int
    repeated: bool
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """Rank of the packed factors: the largest rank, rounded up so that strides are multiples of 16 bytes."""
        E = self.frozen.shape[0]
        most = max((adapter.rank(E) for adapter in self.adapters if adapter is not None), default=0)
        step = max(1, 16 // self.dtype.itemsize)
        return -(-most // step) * step

    @property
    def scaled(self) -> bool:
        return any(adapter is not None and adapter.magnitude is not None for adapter in self.adapters)

    @property
    def rates(self) -> list[float]:
        return [adapter.dropout if adapter is not None else 0.0 for adapter in self.adapters]

    @property
    def base_rates(self) -> list[float]:
        """Dropout rate of the base product by owner; 0 for owners whose base product is not dropped."""
        return [
            a.dropout if a is not None and a.magnitude is not None and a.base_dropped else 0.0 for a in self.adapters
        ]

    def packed_A(self) -> torch.Tensor:
        """[G, r, K]"""
        E, _, K = self.frozen.shape
        own = [None if a is None else a_by_expert(a.A, E) for a in self.adapters]
        return self._packed(own, (E, self.rank, K))

    def packed_B(self) -> torch.Tensor:
        """s B', [G, r, N]"""
        E, N, _ = self.frozen.shape
        own = [None if a is None else b_by_expert(a.B, E).transpose(1, 2) for a in self.adapters]
        return self._packed(own, (E, self.rank, N), [1.0 if a is None else a.scaling for a in self.adapters])

    def _packed(
        self, own: Sequence[torch.Tensor | None], shape: tuple[int, int, int], scalings: Sequence[float] | None = None
    ) -> torch.Tensor:
        """Packed tensor of the adapters' factors, one after the other for each expert, times scalings; each product is rounded
        once."""
        E, rows, columns = shape
        full = all(one is not None and one.shape == shape for one in own)
        new = torch.empty if full else torch.zeros
        out = new(E, len(own), rows, columns, dtype=self.dtype, device=self.frozen.weight.device)
        for owner, one in enumerate(own):
            if one is None:
                continue
            place = out[:, owner, : one.shape[1], : one.shape[2]]
            if scalings is None:
                place.copy_(one)
            else:
                torch.mul(one, scalings[owner], out=place)
        return out.flatten(0, 1)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """g - 1 and one over the norms, [G, N]; 0 and 1 for owners without a magnitude. g is near 1, where 16 bits hold g - 1
        and not g."""
        E, N, _ = self.frozen.shape
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        out = torch.zeros(2, E, len(self.adapters), N, dtype=wide, device=self.frozen.weight.device)
        out[1] = 1
        for owner, one in enumerate(self.adapters):
            if one is not None and one.magnitude is not None:
                assert one.norm is not None
                out[0, :, owner], out[1, :, owner] = one.magnitude.detach() / one.norm - 1.0, 1.0 / one.norm
        return out[0].flatten(0, 1), out[1].flatten(0, 1)

    def drop(self, x: torch.Tensor, rates: Sequence[float]) -> torch.Tensor:
        """x as it came, dropped at the rates of its owners; x itself where there are none."""
        if not any(rates):
            return x
        assert self.keys_T2 is not None
        routing, keys = self.routing, self.keys_T2
        if self.repeated:
            owner = routing.owner
        else:
            owner = routing.pair % routing.owners if len(rates) > 1 else None
            expert_S = routing.expert_of_row() + routing.first
            keys = expert_keys(keys[routing.token_of_row()], self.salt, expert_S, x.shape[1])
        return dropped_rows(x, keys, self.salt, rates, owner)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x by sorted rows [S, K]."""
        return self.routing.rows_of(x) if self.repeated else x

    def back(self, dx_SK: torch.Tensor) -> torch.Tensor:
        """The gradient of x as it came."""
        return self.routing.sum_to_tokens(dx_SK) if self.repeated else dx_SK


class LoraExperts(torch.autograd.Function):
    """The node. Its tensors are x and the operands; what else it is given was settled before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, *flat: torch.Tensor | None) -> torch.Tensor:
        ctx.call = call
        y_SN, S, z_SN = outputs(call, x, any(t is not None and t.requires_grad for t in flat[2::FIELDS]))
        ctx.save_for_backward(x, S, z_SN, *flat)
        return y_SN

    @staticmethod
    @first_order
    def backward(ctx: Any, d_SN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, S, z_SN, *_ = ctx.saved_tensors
        dx, grads = gradients(ctx.call, x, S, z_SN, d_SN.contiguous(), ctx.needs_input_grad)
        return (dx, None, *grads)


def outputs(call: Call, x: torch.Tensor, keep_z: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """y [S, N], and for the backward S [S, r] and z [S, N], None where it is not needed."""
    frozen, routing = call.frozen, call.routing
    x_SK = call.rows(x)
    y_SN = rows_times(x_SK, frozen.from_inputs(), routing.by_expert)
    S = z_SN = None
    if call.rank:
        S = low_rank.down(call.drop(x, call.rates), call.packed_A(), routing, call.repeated)
        if not call.scaled:
            low_rank.add_(y_SN, S, call.packed_B(), routing)
        else:
            base_SN = y_SN
            if any(call.base_rates):
                base_SN = rows_times(call.rows(call.drop(x, call.base_rates)), frozen.from_inputs(), routing.by_expert)
            z_SN = torch.empty_like(y_SN) if keep_z else None
            low_rank.add_scaled_(y_SN, base_SN, S, call.packed_B(), call.scales()[0], routing, z_SN)
    if frozen.bias is not None:
        y_SN += frozen.bias[routing.expert_of_row()]
    return y_SN, S, z_SN


def gradients(
    call: Call, x: torch.Tensor, S: torch.Tensor | None, z_SN: torch.Tensor | None, d_SN: torch.Tensor,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """dx, and the gradients of the operands in the order of the node's arguments. needed: of all the node's arguments."""
    routing = call.routing
    need_x, need = needed[0], needed[2:]
    grads: list[torch.Tensor | None] = [None] * len(need)
    e_SN, more_SN = d_SN, None
    if call.scaled:
        more_GN, inverse_GN = call.scales()
        more_SN = more_GN.to(call.dtype)[routing.pair].mul_(d_SN)
        e_SN = d_SN + more_SN
        if z_SN is not None:
            dm_GN = sums_of_rows(d_SN.to(more_GN.dtype) * z_SN, routing.by_pair).mul_(inverse_GN)
            _spread(grads, 2, need, dm_GN.view(-1, routing.owners, dm_GN.shape[1]), call)
    dS = None
    if S is not None:
        dS = low_rank.down(e_SN, call.packed_B(), routing, repeated=False)
        if any(need[1::FIELDS]):
            dB_GrN = low_rank.sums(S, e_SN, routing, repeated=False)
            _spread(grads, 1, need, dB_GrN.view(-1, routing.owners, *dB_GrN.shape[1:]), call)
        if any(need[0::FIELDS]):
            dA_GrK = low_rank.sums(dS, call.drop(x, call.rates), routing, call.repeated)
            _spread(grads, 0, need, dA_GrK.view(-1, routing.owners, *dA_GrK.shape[1:]), call)
    return _inputs(call, d_SN, e_SN, more_SN, dS) if need_x else None, grads


def _inputs(
    call: Call, d_SN: torch.Tensor, e_SN: torch.Tensor, more_SN: torch.Tensor | None, dS: torch.Tensor | None
) -> torch.Tensor:
    """dx as x came. more: (g - 1) d, where owners have magnitudes."""
    routing, W = call.routing, call.frozen.from_outputs()
    two_bases = any(call.base_rates)
    dx = rows_times(d_SN if two_bases else e_SN, W, routing.by_expert)
    if dS is None:
        return call.back(dx)
    if not two_bases and not any(call.rates):
        return call.back(low_rank.add_(dx, dS, call.packed_A(), routing))
    through = low_rank.add_(torch.zeros_like(dx), dS, call.packed_A(), routing)
    if two_bases:  # gradient through the base product of the dropped x
        assert more_SN is not None
        both = rows_times(more_SN, W, routing.by_expert)
        if call.base_rates == call.rates:
            through += both
        else:
            dropped = call.drop(call.back(both), call.base_rates)
            return call.back(dx) + dropped + call.drop(call.back(through), call.rates)
    return call.back(dx) + call.drop(call.back(through), call.rates)


def _spread(
    grads: list[torch.Tensor | None], at: int, need: Sequence[bool], by_owner: torch.Tensor, call: Call
) -> None:
    """Put the parts of [E, J, ...] where the owners' gradients stand, in the layout and dtype of the operands."""
    for owner, adapter in enumerate(call.adapters):
        place = owner * FIELDS + at
        if adapter is None or not need[place]:
            continue
        part, r = by_owner[:, owner], adapter.rank(call.frozen.shape[0])
        if at == 0:
            grads[place] = part[:, :r].to(adapter.A.dtype).reshape(adapter.A.shape)
        elif at == 1:
            scaled = part[:, :r].to(adapter.B.dtype) * adapter.scaling
            grads[place] = scaled.permute(2, 1, 0).reshape(adapter.B.shape)
        elif adapter.magnitude is not None:
            grads[place] = part.to(adapter.magnitude.dtype)
