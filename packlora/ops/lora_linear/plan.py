"""Plan: one way to compute the operator of reference.py, forward and backward, named by its parts.

All plans compute the same function. They differ in which matrix products are formed, in what order, by which kernel, and in
what is kept for the backward. `mm` is torch.mm (cuBLAS, MKL); `routed` and `one-pass` are Triton kernels, of kernels/.

Whether a plan computes a call is `why_not`'s to say, and nobody else's.

Shapes: T tokens, K inputs, N outputs, r rank; x [T, K], W [N, K], A [r, K], B [N, r], d = dY [T, N], xd = dropout(x).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, NamedTuple

Down = Literal["mm", "routed"]
"""S = xd A'. mm: per run of tokens, on a dropped copy of x. routed: one kernel, dropout in registers, own adapter only."""

Up = Literal["after", "before", "routed", "epilogue", "fused", "merged"]
"""y = g (x W' + S B') + bias. after: base product, then S B' added (see `ordered`). before: S B' written first, the base
product accumulates. routed: the same with one kernel for all adapters and the bias. epilogue: base product, then one kernel
over it for all the rest. fused: one GEMM kernel. merged: x (W + s B A)', lossy. g is DoRA's; the first three give it a pass
of its own."""

Grad = Literal["mm", "one-pass"]
"""dS = s e B and dB = e' S, e = g d. mm: two products per run. one-pass: one kernel, d is read once."""

Dx = Literal["after", "before", "routed", "fused", "merged"]
"""dx = d W + dropout'(dS A), and dA. after, before: as in Up, dA by a product of its own. routed: one kernel reads x, gives dA
and writes dropout'(dS A), onto which the base product accumulates. fused: one GEMM kernel for dx, dA apart. merged:
d (W + s B A), lossy."""

ViaA = Literal["dS", "xd"]
"""dA = dS' xd, or s B' (d' xd): RunLoRA's other association, through a product of the size of W."""

ViaB = Literal["S", "xd"]
"""dB = s d' S, or s (d' xd) A'."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts. `keep_s`: S is saved for the backward (T r numbers) or computed again."""

    down: Down = "mm"
    up: Up = "after"
    grad: Grad = "mm"
    dx: Dx = "after"
    dA: ViaA = "dS"
    dB: ViaB = "S"
    keep_s: bool = True

    @property
    def name(self) -> str:
        """For example `mm/after-mm/after`, with what differs from the usual appended: `mm/after-mm/merged+dA:xd`."""
        text = f"{self.down}/{self.up}-{self.grad}/{self.dx}"
        for part in ("dA", "dB"):
            if (value := getattr(self, part)) == "xd":
                text += f"+{part}:{value}"
        return text if self.keep_s else text + "+again"

    @property
    def lossy(self) -> bool:
        """Rounds more than the plain chain: a merged weight loses whatever is under half an ulp of W."""
        return "merged" in (self.up, self.dx)

    @property
    def rearranged(self) -> bool:
        """Merges weights, or associates through d' xd: torch_path.py computes it."""
        return "merged" in (self.up, self.dx) or "xd" in (self.dA, self.dB)

    @property
    def needs_triton(self) -> bool:
        return _needs_triton(self)

    def to_dict(self) -> dict[str, str | bool]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def from_dict(values: dict[str, str | bool]) -> Plan:
        """Raises ValueError, naming the part, where a value is not one of the accepted ones."""
        accepted = {
            "down": ("mm", "routed"), "up": ("after", "before", "routed", "epilogue", "fused", "merged"),
            "grad": ("mm", "one-pass"),
            "dx": ("after", "before", "routed", "fused", "merged"), "dA": ("dS", "xd"), "dB": ("S", "xd"),
            "keep_s": (True, False),
        }  # fmt: skip
        for name, value in values.items():
            if name not in accepted:
                raise ValueError(f"a plan has no part {name!r}; it has {', '.join(accepted)}")
            if value not in accepted[name]:
                raise ValueError(f"plan part {name}: {value!r} is not one of {', '.join(map(str, accepted[name]))}")
        return Plan(**values)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def ordered(plan: Plan, itemsize: int) -> Plan:
    """The plan as it is carried out in a dtype of `itemsize` bytes: in 16 bits `before` stands in for `after`.

    What is added to a product that was rounded already is lost where it is under half of the last bit, always towards nothing,
    and all that an adapter adds in its first steps is as small as that. Where the base product is added to the small one, the
    sum is rounded once, and what is lost averages out. Some libraries round the product even then (gpu.rounds_before_adding):
    `before` makes a plain layer's output in float32 there.
    """
    if itemsize != 2:
        return plan
    return replace(plan, up="before" if plan.up == "after" else plan.up, dx="before" if plan.dx == "after" else plan.dx)


@lru_cache(maxsize=1024)
def _needs_triton(plan: Plan) -> bool:
    kernels = ("routed", "epilogue", "fused", "one-pass")
    return any(part in kernels for part in (plan.down, plan.up, plan.grad, plan.dx))


CHAIN = Plan()
"""Plain products, always legal; see `ordered` for 16 bits."""
ROUTED = Plan("routed", "routed", "one-pass", "routed")
"""The Triton kernels around two cuBLAS products; the usual choice on a GPU."""


# --- which plans compute a call ----------------------------------------------------------------------------------------


class Situation(NamedTuple):
    """What of a call decides which plans compute it. It is about the adapters that own tokens of the call: others may be
    attached to its layers, and do not matter."""

    single: bool
    """One adapter owns all tokens."""
    low_rank: bool
    """One of them has A and B."""
    dropped: bool
    """One of them has dropout."""
    composed: bool
    """One of them has a magnitude (DoRA) or a bias of its own."""
    base_dropped: bool
    """One of them is DoRA under dropout that scales the base product of the dropped x: there are two base products."""
    double: bool = False
    """In float64, which the kernels do not compute."""
    dense: bool = True
    """All weights are tensors that a kernel or a sum can read (frozen.FrozenWeight.dense)."""


def why_not(plan: Plan, call: Situation) -> str | None:
    """Why the plan does not compute the call, or None where it does. The plain chain, S kept or not, computes every call.

    Whether this machine has what the plan needs, and whether the plan is worth it, is asked elsewhere (plans/space.py).
    """
    if call.base_dropped and (plan.rearranged or plan.needs_triton):
        return "DoRA that scales the base product of the dropped x has two base products, which the plain chain makes"
    if plan.lossy and call.dropped:
        return "a merged weight has no place for dropout"
    if not call.dense and (plan.lossy or "fused" in (plan.up, plan.dx)):
        return "a fused kernel or a merged weight reads the weight itself, which is not there as a dense tensor"
    if plan.up == "merged" and plan.keep_s and plan.dB == "S":
        return "S, which is to be kept, is not computed in a merged forward: keep_s must be False"
    if plan.rearranged and plan.needs_triton:
        return "merged weights and products through d' xd are made of plain products"
    if plan.rearranged and call.composed:
        return "merged weights and products through d' xd are for plain LoRA"
    if plan.rearranged and not call.single:
        return "merged weights and products through d' xd are for one adapter that owns all tokens"
    if plan.needs_triton and call.double:
        return "the kernels are not for float64"
    if plan.needs_triton and not call.low_rank:
        return "no adapter is there that the kernels could be for"
    return None


def legal(plan: Plan, call: Situation) -> Plan:
    """The plan where it computes the call, else the plain chain."""
    return plan if why_not(plan, call) is None else Plan(keep_s=plan.keep_s)
