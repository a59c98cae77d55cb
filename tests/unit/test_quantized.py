"""Frozen weights of bitsandbytes' codes: the operator computes with what they stand for, and makes it where it is read."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from group_cases import KINDS, GroupCase, cast, compare, make_case, outcome, run_reference
from quantised import KINDS as STORED
from quantised import bnb, codes, dequantised
from seeds import SEED

from packlora.adapters.norms import NormHandle, RowNorms
from packlora.codes.library import FourBit
from packlora.codes.weight import Quantized, QuantizedLinear
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.temporary import _MADE
from packlora.ops.lora_linear.types import situation


def stored(case: GroupCase, kind: str, dtype: torch.dtype = torch.float64) -> tuple[GroupCase, GroupCase]:
    """The case with quantised weights, and with the dense ones that these stand for."""
    weights = [codes(layer.frozen.rows(0, layer.frozen.shape[0]), kind) for layer in case.layers]
    both = ([Quantized(own, dtype) for own in weights], [Dense(dequantised(own).to(dtype)) for own in weights])
    return tuple(
        replace(case, layers=tuple(replace(layer, frozen=w) for layer, w in zip(case.layers, own, strict=True)))
        for own in both
    )  # type: ignore[return-value]


class Watched:
    """Counts what is made of codes, and how much of it is alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = Counter[int]()
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        make = Quantized._values

        def watched(weight: Quantized) -> torch.Tensor:
            tensor = make(weight)
            self.made[id(weight.codes.stored)] += 1
            self.alive = [*(ref for ref in self.alive if ref() is not None), weakref.ref(tensor)]
            self.most = max(self.most, sum(ref().numel() for ref in self.alive))  # type: ignore[union-attr]
            return tensor

        monkeypatch.setattr(Quantized, "_values", watched)

    def take(self) -> set[int]:
        """How often weights were made since the last time."""
        found = set(self.made.values())
        self.made.clear()
        return found

    @property
    def left(self) -> int:
        return sum(ref() is not None for ref in self.alive)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    gc.collect()
    yield Watched(monkeypatch)
    assert not _MADE.tensors


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_stand_for_what_bitsandbytes_makes_of_them(kind: str, dtype: torch.dtype) -> None:
    for shape in ((9, 33), (24, 64), (6, 48), (3, 2)):  # bitsandbytes' CPU kernel takes wrong scales of rows of 48
        own = codes(torch.randn(shape), kind)
        assert own.shape == shape and own.settings["method"] == kind.split()[0]
        wide = torch.promote_types(dtype, torch.float32)  # 16 bits are rounded from there
        assert torch.equal(own.values(dtype), dequantised(own).to(wide).to(dtype))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_cast_of_a_module_reaches_codes_that_are_saved_as_floats(storage: torch.dtype) -> None:
    """bnb_4bit_quant_storage: bytes in tensors of floats, as FSDP wants them."""
    own, state = bnb.functional.quantize_4bit(torch.randn(24, 64), quant_type="nf4", quant_storage=storage)
    assert own.dtype == storage
    want = FourBit(own, state).values(torch.float32)
    layer = torch.nn.Sequential(QuantizedLinear(FourBit(own, state), torch.zeros(24), torch.float32))
    for cast_by in ("half", "bfloat16", "double", "float"):
        assert torch.equal(getattr(layer, cast_by)()[0].frozen.codes.values(torch.float32), want)
    for dtype in (torch.float16, torch.float64):
        assert torch.equal(layer.to(dtype)[0].frozen.codes.values(torch.float32), want)


@pytest.mark.parametrize("plan", [CHAIN, Plan(up="before", dx="before")], ids=lambda plan: plan.name)
@pytest.mark.parametrize(
    ("kind", "of_codes"),
    [("six adapters, siblings, some absent", "nf4 double"), ("DoRA and LoRA, siblings, some absent, biases", "fp4"),
     ("DoRA, dropout", "int8"), ("DoRA with dropout and LoRA", "nf4"), ("no adapters", "nf4 double")],
)  # fmt: skip
def test_a_quantised_weight_gives_the_specified_numbers(kind: str, of_codes: str, plan: Plan) -> None:
    ranks = KINDS[kind]["ranks"]
    case = make_case(31, 20, [13, 24, 9][: len(ranks[0]) if ranks else 1], with_bias=True, seed=SEED, **KINDS[kind])
    case, dense = stored(case, of_codes)
    compare(outcome(case, plan), run_reference(dense, torch.float64), 1e-11)


@pytest.mark.parametrize(
    "plan", [Plan(up="merged", keep_s=False), Plan(dx="merged"), ROUTED], ids=lambda plan: plan.name
)
def test_plans_that_read_the_weight_read_the_temporary_one(plan: Plan) -> None:
    dtype = torch.float32 if plan == ROUTED else torch.float64
    drawn = make_case(40, 32, [16], [[8]], [0.0], True, SEED, torch.float32, whole=0)
    case, dense = stored(cast(drawn, dtype)[0], "nf4 double", dtype)
    assert situation(case.layers, case.segments, 40).dense
    got, want = (outcome(each, plan) for each in (case, dense))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("sizes", [[24], [16, 16], [24, 8, 8]], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_each_weight_is_made_once_in_the_forward_and_once_in_the_backward(
    sizes: list[int], dropout: float, watched: Watched
) -> None:
    """However many jobs own tokens, DoRA's second base product among them; no more than two of the largest are there at once,
    and none between calls."""
    ranks, dora = [[4] * len(sizes)] * 3, [True, True, False]
    case, _ = stored(make_case(40, 20, sizes, ranks, [dropout] * 3, True, SEED, dora=dora), "nf4")
    x, layers = case.x.requires_grad_(), case.layers
    from packlora.ops.lora_linear.autograd import lora_group

    outputs = lora_group(x, layers, case.segments, case.keys, case.salt)
    assert watched.take() == {1} and watched.left == 0
    torch.autograd.grad(outputs, x, case.dy)
    assert watched.take() == {1} and watched.left == 0
    assert watched.most <= 2 * max(sizes) * 20


@pytest.mark.parametrize("version_counted", [False, True])
def test_norms_are_of_one_temporary_weight_at_a_time_and_stand_while_the_codes_do(
    version_counted: bool, watched: Watched
) -> None:
    norms, weights, handles = RowNorms(), [], []
    for _ in range(3):
        weights.append(Quantized(codes(torch.randn(13, 20), "nf4 double"), torch.float64))
        A, B = torch.randn(4, 20, dtype=torch.float64), torch.randn(13, 4, dtype=torch.float64)
        handles.append(NormHandle(norms, weights[-1], A, B, 1.5, version_counted))

    def check() -> None:
        for handle, weight in zip(handles, weights, strict=True):
            want = (weight.codes.values(torch.float64) + 1.5 * handle.B @ handle.A).norm(dim=1)
            torch.testing.assert_close(handle.get(), want, rtol=1e-12, atol=0)

    check()
    assert watched.most == 13 * 20 and watched.left == 0
    watched.take()
    check()
    assert watched.take() == set()
    handles[1].B.mul_(2)
    check()
    assert set(watched.made) == {id(weights[1].codes.stored)}
    weights[2].codes.stored.fill_(0x3C)
    check()
    assert weights[0] == Quantized(weights[0].codes, torch.float64) != weights[1]


@pytest.mark.parametrize("kind", STORED)
def test_the_layer_is_a_linear_layer_of_what_its_codes_stand_for(kind: str, watched: Watched) -> None:
    own, bias = codes(torch.randn(6, 10), kind), torch.randn(6, dtype=torch.float64)
    layer = QuantizedLinear(own, bias, torch.float64)
    x, d = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, 6, dtype=torch.float64)
    want = torch.nn.functional.linear(x, dequantised(own).double(), bias)
    for each in (layer, copy.deepcopy(layer), layer.to("cpu")):
        got = each(x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, d, retain_graph=True)[0] for y in (got, want)))
        assert watched.left == 0
    held = layer.state_dict()
    assert held.keys() > {"weight", "bias"} and all(isinstance(value, torch.Tensor) for value in held.values())
    assert not any(parameter.requires_grad for parameter in layer.parameters())
