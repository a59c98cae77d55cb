"""Groups of layers under checkpointing and other hooks on saved tensors: the same bits, and no product is made for nobody."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_cases import KINDS, GroupCase, cast, make_case
from seeds import SEED, SOAK
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.recompute import Recompute

BEFORE, AGAIN = Plan(up="before", dx="before"), Plan(keep_s=False)
MERGED = Plan(up="merged", dx="merged", keep_s=False)
PRODUCTS = [MERGED, Plan(dx="merged"), Plan(dA="xd", dB="xd"), Plan(up="before", dx="before", dA="xd", keep_s=False)]
Block = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class Products(TorchDispatchMode):
    """Counts products [T, K] x [K, N] by (K, N)."""

    def __init__(self, T: int) -> None:
        super().__init__()
        self.T, self.counts = T, Counter[tuple[int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            if left.shape[0] == self.T:
                self.counts[left.shape[1], right.shape[1]] += 1
        return func(*args, **(kwargs or {}))

    def taken(self) -> Counter[tuple[int, int]]:
        """Those since it was last asked."""
        counts, self.counts = self.counts, Counter()
        return counts


# --- what a recomputation makes ----------------------------------------------------------------------------------------

T, K, M, N, R = 24, 20, 36, 28, 3


def two_layers(plan: Plan) -> tuple[Block, list[torch.Tensor]]:
    """A block [T, K] -> [T, N] that ends in an adapted layer [N, M], and its parameters."""
    g = torch.Generator().manual_seed(SEED)
    layers, parameters = [], []
    for inputs, outputs in ((K, M), (M, N)):
        A, B = torch.randn(R, inputs, generator=g), torch.randn(outputs, R, generator=g)
        parameters += [A.requires_grad_(), B.requires_grad_()]
        low = LowRank(A, B, 0.7)
        layers.append(
            Layer(Dense(torch.randn(outputs, inputs, generator=g)), torch.randn(outputs, generator=g), {0: low})
        )

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (h,) = lora_group(x, layers[:1], [Segment(0, 0, T)], plan=plan)
        (y,) = lora_group(h.sigmoid(), layers[1:], [Segment(0, 0, T)], plan=plan)
        return (y + 1,)

    return block, parameters


@pytest.mark.parametrize("plan", [CHAIN, BEFORE, AGAIN, *PRODUCTS], ids=lambda plan: plan.name)
def test_a_recomputation_makes_no_base_product_of_the_layer_that_ends_its_block(plan: Plan) -> None:
    block, _ = two_layers(plan)
    x = torch.randn(T, K, requires_grad=True)
    for early_stop in (True, False):
        with Products(T) as products, set_checkpoint_early_stop(early_stop):
            (y,) = checkpoint(block, x, use_reentrant=False)
            made = products.taken()
            y.sum().backward()
            again = products.taken()
        assert (made[K, M], made[M, N]) == (1, 1)
        assert (again[K, M], again[M, N]) == (1, 0 if early_stop else 1)


def test_trained_magnitudes_need_the_product_again_and_frozen_ones_do_not() -> None:
    """Also where a caller's state saw the layers before they were frozen."""
    case, leaves = cast(make_case(T, K, [N], [[R]], [0.0], False, SEED, dora=[True]), torch.float32)
    state = GroupState(version_counted=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return lora_group(x, case.layers, case.segments, case.keys, state=state)[0]

    for trained in (True, False, True):
        leaves["magnitude0.0"].requires_grad_(trained)
        with Products(T) as products:
            y = checkpoint(block, leaves["x"], use_reentrant=False)
            products.taken()
            y.backward(case.dy[0])
        assert products.taken()[K, N] == int(trained)


# --- the same bits -----------------------------------------------------------------------------------------------------


def plainly(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return block(x)


def checkpointed(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def to_its_end(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with set_checkpoint_early_stop(False):
        return checkpointed(block, x)


def reentrant(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def nested(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return checkpointed(lambda x: checkpointed(block, x), x)


def offloaded(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def anomaly(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        return checkpointed(block, x)


MADE_AGAIN = ((CHAIN, True), (BEFORE, False), (AGAIN, True))
"""Plans, and whether inputs are made again."""
HOOKED = [checkpointed, to_its_end, reentrant, nested, offloaded, anomaly]


def outcome(
    case: GroupCase, plan: Plan, how: Callable[[Block, torch.Tensor], tuple[torch.Tensor, ...]], recompute: bool = False,
    frozen: str | tuple[str, ...] = (), used: Callable[[tuple[torch.Tensor, ...]], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor | None]:  # fmt: skip
    """Outputs and gradients by name; frozen: first letters of leaves without gradient; used: what the backward starts at,
    all outputs where it is not given."""
    own, leaves = cast(case, torch.float32)
    for name, leaf in leaves.items():
        leaf.requires_grad_(not name.startswith(frozen))

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = x.tanh()  # who made x is inside too
        made = Recompute(torch.tanh, (x,)) if recompute else None
        return lora_group(tokens, own.layers, own.segments, own.keys, own.salt, plan, recompute=made)

    outputs = how(block, own.x)
    if used is not None:
        used(outputs).backward()
    else:
        torch.autograd.backward(outputs, own.dy)
    return {f"y{index}": y.detach() for index, y in enumerate(outputs)} | {f"d{k}": t.grad for k, t in leaves.items()}


def assert_same_bits(
    got: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None], zeros: bool = False
) -> None:
    """zeros: what has no gradient may have one of zeros, which torch's reentrant checkpointing gives unused outputs."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        other = got[name]
        if zeros and value is None and other is not None:
            assert not other.any(), name
            continue
        assert (other is None) == (value is None), name
        assert value is None or (other is not None and torch.equal(other, value)), name


def some_case(kind: str, **kwargs: Any) -> GroupCase:
    arguments = {**KINDS[kind], **kwargs}
    sizes = [29, 12, 40][: len(arguments["ranks"][0]) if arguments["ranks"] else 1]
    return make_case(37, 33, sizes, with_bias=bool(SEED % 2), seed=SEED, **arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("how", HOOKED, ids=lambda how: how.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_without_hooks(
    kind: str, how: Callable[[Block, torch.Tensor], tuple[torch.Tensor, ...]]
) -> None:
    case = some_case(kind)
    for plan, recompute in itertools.product((CHAIN, BEFORE, AGAIN), (False, True)) if SOAK else MADE_AGAIN:
        assert_same_bits(outcome(case, plan, how, recompute), outcome(case, plan, plainly, recompute))
    kept = some_case(kind, keep_output=True)
    assert_same_bits(outcome(kept, CHAIN, how), outcome(kept, CHAIN, plainly))


@pytest.mark.parametrize("how", [checkpointed, offloaded], ids=lambda how: how.__name__)
@pytest.mark.parametrize("kind", ["dropout", "siblings", "four adapters"])
def test_so_are_those_of_the_kernels(kind: str, how: Callable[[Block, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    case = some_case(kind)
    assert_same_bits(outcome(case, ROUTED, how), outcome(case, ROUTED, plainly))
