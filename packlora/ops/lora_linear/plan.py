"""Plan: how to compute the operator of reference.py, forward and backward, named by its parts; PLANS: the ones in use.

All plans compute the same function. They differ in which matrix products are formed, in what order, by which kernel, and in
what is kept for the backward. `mm` is torch.mm (cuBLAS, MKL); `routed` and `one-pass` are Triton kernels, of kernels/.

Whether a plan computes a call, and on this device, is `why_not`'s to say, and nobody else's. Which of the plans that do is the
fastest is estimated and measured in the room plans.

Shapes: T tokens, K inputs, N outputs, r rank; x [T, K], W [N, K], A [r, K], B [N, r], d = dY [T, N], xd = dropout(x).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

Down = Literal["mm", "routed"]
"""S = xd A'. mm: per segment, on a dropped copy of x. routed: one kernel, dropout in registers, own adapter only."""

Up = Literal["after", "before", "routed", "epilogue", "fused", "merged"]
"""y = g (x W' + S B') + bias. after: base product, then S B' added (see `ordered`). before: S B' written first, the base
product accumulates. routed: the same with one kernel for all adapters and the bias. epilogue: base product, then one kernel
over it for all the rest. fused: one GEMM kernel. merged: x (W + s B A)', lossy. g is DoRA's; the first three give it a pass
of its own."""

Grad = Literal["mm", "one-pass"]
"""dS = s e B and dB = e' S, e = g d. mm: two products per segment. one-pass: one kernel, d is read once."""

Dx = Literal["after", "before", "routed", "fused", "merged"]
"""dx = d W + dropout'(dS A), and dA. after, before: as in Up, dA by a product of its own. routed: one kernel reads x, gives dA
and writes dropout'(dS A), onto which the base product accumulates. fused: one GEMM kernel for dx, dA apart. merged:
d (W + s B A), lossy."""

ViaA = Literal["dS", "xd"]
"""dA = dS' xd, or s B' (d' xd): RunLoRA's other association, through a product of the size of W."""

ViaB = Literal["S", "xd"]
"""dB = s d' S, or s (d' xd) A'."""


_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "down": get_args(Down), "up": get_args(Up), "grad": get_args(Grad), "dx": get_args(Dx), "dA": get_args(ViaA),
    "dB": get_args(ViaB), "keep_s": (True, False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a plan; the values of each are explained at its type. Raises ValueError, naming the part, for another."""

    down: Down = "mm"
    """S = xd A', [T, r]."""
    up: Up = "after"
    """The output y [T, N]."""
    grad: Grad = "mm"
    """dS [T, r] and dB [N, r]."""
    dx: Dx = "after"
    """The gradient of the input, [T, K]."""
    dA: ViaA = "dS"
    """Product by which dA [r, K] is formed."""
    dB: ViaB = "S"
    """Product by which dB [N, r] is formed."""
    keep_s: bool = True
    """S is saved for the backward (T r numbers); otherwise it is computed again."""

    def __post_init__(self) -> None:
        for name, accepted in _ACCEPTED.items():
            if (value := getattr(self, name)) not in accepted:
                raise ValueError(f"plan part {name}: {value!r} is not one of {', '.join(map(str, accepted))}")

    @property
    def name(self) -> str:
        """Name of the plan, for example `mm/after-mm/after`; parts that differ from the usual ones are appended:
        `mm/after-mm/merged+dA:xd`."""
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
    def reads_tables(self) -> bool:
        """Whether every step reads tables on the device, and none takes slices of segments."""
        kernels = self.down == "routed" and self.up in ("routed", "epilogue", "fused")
        return kernels and self.grad == "one-pass" and self.dx in ("routed", "fused")

    @property
    def needs_triton(self) -> bool:
        """A part of it is a Triton kernel."""
        return (
            self.grad == "one-pass" or self.down == "routed" or self.up in ("routed", "epilogue", "fused")
            or self.dx in ("routed", "fused")
        )  # fmt: skip

    @staticmethod
    def from_dict(values: dict[str, str | bool]) -> Plan:
        """The plan with these parts and the defaults of the others. Raises ValueError, naming the part, where there is none of
        the name, or the value is not one of the accepted ones."""
        for name in values:
            if name not in _ACCEPTED:
                raise ValueError(f"a plan has no part {name!r}; it has {', '.join(_ACCEPTED)}")
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


CHAIN = Plan()
"""Plain products, which compute every call; see `ordered` for 16 bits."""
ROUTED = Plan("routed", "routed", "one-pass", "routed")
"""The Triton kernels around two cuBLAS products."""


# --- the plans in use --------------------------------------------------------------------------------------------------


class NamedPlan(NamedTuple):
    """name: short, for commands and tables. use: where it is the fastest, or what else it is for."""

    name: str
    plan: Plan
    use: str


RUNLORA = (
    NamedPlan("forward1-backward1", Plan(keep_s=False), "the plain chain that recomputes S: the least memory"),
    NamedPlan("forward1-backward2", Plan(dB="xd", keep_s=False), "no case known: for comparison with the paper"),
    NamedPlan("forward1-backward3", Plan(dA="xd", dB="xd", keep_s=False), "ranks near the width where no dx is wanted"),
    NamedPlan("forward1-backward4", Plan(dx="merged", dA="xd", dB="xd", keep_s=False), "r over width / 4; lossy"),
    NamedPlan("forward1-backward5", Plan(dx="merged", keep_s=False), "T over N; lossy"),
    NamedPlan("forward2-backward1", Plan(up="merged", keep_s=False), "T over half the width; lossy"),
    NamedPlan("forward2-backward2", Plan(up="merged", dB="xd", keep_s=False), "no case known; lossy"),
    NamedPlan("forward2-backward3", Plan(up="merged", dA="xd", dB="xd", keep_s=False), "large r, no dx wanted; lossy"),
    NamedPlan("forward2-backward4", Plan("mm", "merged", "mm", "merged", "xd", "xd", False), "r over width / 4; lossy"),
    NamedPlan("forward2-backward5", Plan(up="merged", dx="merged", keep_s=False), "T over N and half the width; lossy"),
)  # fmt: skip
"""RunLoRA's (Cherniuk et al., arXiv 2312.03415) by the paper's names: one adapter without dropout, S never kept. Matrix
products with their shapes, and FLOPs, multiply and add, with all three gradients:

    forward1    x [T, K] W' + (x A') [T, r] B'                                       2 T (KN + Kr + rN)
    forward2    x [T, K] (W + s B A)' [K, N], lossy                                  2 (KNr + TKN)
    backward1   dA = (s d B)' [r, T] x      dB = s d' (x A')      dx = d W + (s d B) A    2 T (KN + 2rN + 3Kr)
    backward2   dA = (s d B)' [r, T] x      dB = s (d' x) A'      dx = d W + (s d B) A    2 T (2KN + rN + 2Kr) + 2 KNr
    backward3   dA = s B' (d' x) [N, K]     dB = s (d' x) A'      dx = d W + (s d B) A    2 T (2KN + rN + Kr) + 4 KNr
    backward4   dA = s B' (d' x) [N, K]     dB = s (d' x) A'      dx = d (W + s B A)      4 TKN + 6 KNr
    backward5   dA = (s d B)' [r, T] x      dB = s d' (x A')      dx = d (W + s B A)      2 T (KN + 2rN + 2Kr) + 2 KNr

(backward3 and 4 are given as they are computed here, where d' x is formed once.) Those that merge a weight are lossy and are
used only where that is asked for. forward3 and forward4 are forward1 and forward2 in another order of steps; the
backwards 6 to 8 of RunLoRA's code never have the fewest FLOPs."""

PLANS = (
    NamedPlan("chain", CHAIN, "every call; few tokens; large ranks; the CPU"),
    NamedPlan("base-added", Plan(up="before", dx="before"), "a CPU in float32: the base product comes last"),
    NamedPlan("one-pass", Plan(grad="one-pass"), "one adapter without dropout on a GPU without the fused kernels"),
    NamedPlan("kernels", ROUTED, "several adapters, and dropout, where no fused kernel is to be had"),
    NamedPlan("kernels-mm-grad", Plan("routed", "routed", "mm", "routed"), "the same at ranks over 16"),
    NamedPlan("kernels-mm-dx", Plan("routed", "routed", "one-pass", "after"), "many adapters, no dropout"),
    NamedPlan("kernels-mm-up", Plan("routed", "after", "one-pass", "routed"), "many tokens of adapters with dropout"),
    NamedPlan("kernels-mm-up-grad", Plan("routed", "after", "mm", "routed"), "one adapter with dropout at ranks over 16"),
    NamedPlan("epilogue", Plan("routed", "epilogue", "one-pass", "routed"), "float32 and DoRA with many small adapters"),
    NamedPlan("epilogue-mm-grad", Plan("routed", "epilogue", "mm", "routed"), "the same at ranks over 16"),
    NamedPlan("epilogue-one-pass", Plan("mm", "epilogue", "one-pass", "after"), "DoRA of rank 16 without dropout"),
    NamedPlan("epilogue-mm", Plan("mm", "epilogue", "mm", "after"), "DoRA without dropout at ranks over 16"),
    NamedPlan("fused-up-products", Plan("mm", "fused", "mm", "after"), "16 bits on Hopper: ranks of hundreds"),
    NamedPlan("fused-products", Plan("mm", "fused", "mm", "fused"), "16 bits on Hopper: DoRA at large ranks"),
    NamedPlan("fused-up-mm-down", Plan("mm", "fused", "one-pass", "routed"), "16 bits on Hopper: several layers, no dropout"),
    NamedPlan("fused-mm-down", Plan("mm", "fused", "one-pass", "fused"), "16 bits on Hopper: one adapter without dropout"),
    NamedPlan("fused-up", Plan("routed", "fused", "one-pass", "routed"), "16 bits on Hopper: dropout, many adapters, small K"),
    NamedPlan("fused", Plan("routed", "fused", "one-pass", "fused"), "16 bits on Hopper: wide layers of rank 16"),
    NamedPlan("fused-mm-grad", Plan("routed", "fused", "mm", "fused"), "16 bits on Hopper: ranks over 16"),
    *RUNLORA,
)  # fmt: skip
"""Plans among which one is chosen, the plain chain first. A plan is here because somewhere in a wide grid of cases the best of
the others takes over 1 % longer by the cost model, because it was chosen in a recorded result, or because RunLoRA's paper names
it."""


def named_plan(name: str) -> Plan:
    """The plan of the list with this name, or any whose parts it spells as Plan.name does. Raises ValueError where there is
    none."""
    for one in PLANS:
        if one.name == name:
            return one.plan
    if "/" not in name:
        raise ValueError(f"no plan is named {name!r}; there are {', '.join(one.name for one in PLANS)}")
    main, *extras = name.split("+")
    parts = [part for half in _halves(main) for part in half.split("/")]
    if len(parts) != 4:
        raise ValueError(f"expected DOWN/UP-GRAD/DX, for example {CHAIN.name}; found {name!r}")
    values: dict[str, str | bool] = dict(zip(("down", "up", "grad", "dx"), parts, strict=True))
    for extra in extras:
        part, colon, value = extra.partition(":")
        if extra == "again":
            values["keep_s"] = False
        elif colon and part in ("dA", "dB"):
            values[part] = value
        else:
            raise ValueError(f"{extra!r} is not one of dA:xd, dB:xd, again")
    found = Plan.from_dict(values)
    if found.name != name:
        raise ValueError(f"{name!r} is written {found.name!r}")
    return found


def _halves(main: str) -> list[str]:
    """`mm/after` and `one-pass/after` of `mm/after-one-pass/after`: the first hyphen after the first slash parts them."""
    slash = main.find("/")
    hyphen = main.find("-", slash)
    return [main] if slash < 0 or hyphen < 0 else [main[:hyphen], main[hyphen + 1 :]]


# --- which plans compute a call ----------------------------------------------------------------------------------------

FUSED_MULTIPLE = 16
"""Number that K and every N must be a multiple of for a fused product."""


Rounding = Literal["exact", "lossy", "any"]
"""Rounding that a plan may have: exact, as the chain's; lossy, also by a merged weight; any, as in the plan that was requested
by name."""


class Target(NamedTuple):
    """Properties of the device and of the sizes that decide which plans run there exactly as they are written."""

    on_gpu: bool
    dtype: str
    """Dtype of x and W, for example bfloat16."""
    no_kernels: str | None
    """Reason why the Triton kernels do not run there; None where they do."""
    copy_engine: bool
    """Kernels may read through tensor descriptors (gpu.has_copy_engine)."""
    rounds_first: bool
    """16-bit products are rounded before they are added to anything (gpu.rounds_before_adding)."""
    sizes: tuple[int, ...]
    """K and every N."""
    rounding: Rounding = "exact"
    """Rounding that a plan may have there."""


class Situation(NamedTuple):
    """Properties of a call that decide which plans compute it. Only the adapters that own tokens of the call count; others may
    be attached to its layers."""

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
    """The call is in float64, which the kernels do not compute."""
    dense: bool = True
    """A kernel or a sum can read all weights as tensors (frozen.FrozenWeight.has_tensor)."""
    moving: bool = False
    """The boundaries of its segments are on the device alone (see Boundaries.known)."""
    target: Target | None = None
    """Device and sizes where the plan is carried out. None for a plan that the caller gives by its parts: it is replaced only
    where it would not compute the call at all."""


def why_not(plan: Plan, call: Situation) -> str | None:
    """Reason why the plan does not compute the call, on its target, as exactly as the chain; None where it does. The plain
    chain, S kept or not, computes every call."""
    if call.moving and not plan.reads_tables:
        return "products by segment need its boundaries on the host, and these are on the device alone"
    if plan == Plan(keep_s=plan.keep_s):
        return None
    if call.base_dropped and (plan.rearranged or plan.needs_triton):
        return "DoRA that scales the base product of the dropped x has two base products, which the plain chain makes"
    if plan.lossy and call.dropped:
        return "a merged weight has no place for dropout"
    if not call.dense and (plan.lossy or "fused" in (plan.up, plan.dx)):
        return "a fused kernel or a merged weight reads the weight itself, of which there is no tensor"
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
    return None if call.target is None else _why_not_there(plan, call, call.target)


def _why_not_there(plan: Plan, call: Situation, target: Target) -> str | None:
    """Reason why a plan would round more than it may, or lacks something on the device; None where it runs."""
    narrow = target.dtype in ("bfloat16", "float16")
    if target.rounding != "any" and (reason := _rounds_more(plan, call, target, narrow)) is not None:
        return reason
    if plan.needs_triton and target.no_kernels is not None:
        return target.no_kernels
    divides = not any(size % FUSED_MULTIPLE for size in target.sizes)
    if "fused" in (plan.up, plan.dx) and not (narrow and divides and target.copy_engine):
        return f"fused kernels are for 16 bits and sizes that {FUSED_MULTIPLE} divides, on Hopper or a B200 (TMA)"
    return None


def _rounds_more(plan: Plan, call: Situation, target: Target, narrow: bool) -> str | None:
    """Reason why the plan rounds more than the chain, or is never worth choosing; None otherwise."""
    if call.base_dropped:
        return "DoRA with two base products has the plain chain alone"
    if plan.lossy and target.rounding != "lossy":
        return "a merged weight rounds more than the chain and was not asked for"
    if plan.up == "epilogue" and narrow and not call.composed:  # composed outputs are scaled, and rounded again, anyway
        return "in 16 bits what is added to a rounded product is lost where it is small"
    if "before" in (plan.up, plan.dx) and target.on_gpu and target.dtype == "float32":
        return "float32 products on a GPU round more when they accumulate onto another product"
    return None


def legal(plan: Plan, call: Situation) -> Plan:
    """The plan where it computes the call, else the plain chain.

    Raises:
        ValueError: neither computes a call whose segments move.
    """
    reason, chain = why_not(plan, call), Plan(keep_s=plan.keep_s)
    if reason is not None and why_not(chain, call) is not None:
        raise ValueError(f"plan {plan.name}: {reason}")
    return plan if reason is None else chain
