"""packlora.accelerate on real PEFT models: the same numbers, files and life cycle, and a reason wherever it stands aside."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import tiny_model
from exactness import assert_as_exact
from peft import LoraConfig, get_peft_model
from seeds import SEED, SOAK
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import packlora
from packlora.live import layers as peft_live
from packlora.live.report import ModuleReport, Report
from packlora.ops.lora_linear.plan import Plan

"""Of the inputs, new in every run; pytest prints it where a test names it."""
IDS = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(SEED))


def fill(model: Any, seed: int = SEED) -> Any:
    """Adapters that matter: a fresh adapter has B = 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def lora(family: str = "llama", dtype: torch.dtype = torch.float64, depth: int = 2, **changes: Any) -> Any:
    """A tiny PEFT model in training mode; in float64 the adapters are float64 too."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny_model(family, dtype, num_hidden_layers=depth), LoraConfig(**settings))
    if dtype == torch.float64:
        model = model.double()
    return fill(model).train()


def outcome(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """Logits, loss, and the gradients of all parameters that got one."""
    model.zero_grad()
    out = model(**{"input_ids": IDS, "labels": IDS, **inputs})
    out.loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        limit = tolerance * max(1.0, float(value.abs().max()))
        assert float((got[name] - value).abs().max()) <= limit, f"{name}, seed {SEED}"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the operator was for."""
    calls: list[int] = []
    original = peft_live.lora_group

    def counted(x: Any, layers: Any, *rest: Any) -> Any:
        calls.append(len(layers))
        return original(x, layers, *rest)

    monkeypatch.setattr(peft_live, "lora_group", counted)
    return calls


# --- the same numbers --------------------------------------------------------------------------------------------------


def random_settings(draw: random.Random) -> dict[str, Any]:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    rank = draw.choice([1, 2, 3, 7, 8, 16, 33])
    return {
        "r": rank,
        "lora_alpha": draw.choice([1, 5, 16, 32]),
        "use_rslora": draw.random() < 0.5,
        "use_dora": draw.random() < 0.3,
        "bias": draw.choice(["none", "none", "all", "lora_only"]),
        "target_modules": draw.choice(["all-linear", draw.sample(names, draw.randint(1, 7))]),
        "rank_pattern": draw.choice([{}, {"layers.0.self_attn.q_proj": 5, "down_proj": 17}]),
        "alpha_pattern": draw.choice([{}, {"v_proj": 11, "layers.1.mlp.gate_proj": 3}]),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mistral", "gemma2"])
@pytest.mark.parametrize("number", range(3))
def test_outputs_and_all_gradients_are_peft_s_in_float64(family: str, number: int, used: list[int]) -> None:
    settings = random_settings(random.Random(f"{SEED} {family} {number}"))
    model = lora(family, **settings)
    want = outcome(model)
    report = packlora.accelerate(model)
    assert report.accelerated == len(report.modules)
    assert_same(outcome(model), want)
    assert sum(used) == len(report.modules), settings
    packlora.restore(model)
    assert_same(outcome(model), want, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_of_siblings_are_within_twice_those_of_peft_in_the_same_dtype(dtype: torch.dtype) -> None:
    """All see the same rounded numbers."""

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        torch.manual_seed(SEED + number)
        model = get_peft_model(Pair(96, 120), LoraConfig(r=7, lora_alpha=9, target_modules=["a", "b"]))
        model = fill(model, SEED + number).to(dtype).train()
        x = torch.randn(160, 96).to(dtype)
        dy = torch.randn(2, 160, 120).to(dtype)

        def run(model: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
            x = x.clone().requires_grad_()
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            y = torch.stack(model(x))
            return {
                "y": y.detach(),
                **dict(zip(["x", *trained], torch.autograd.grad(y, [x, *trained.values()], dy), strict=True)),
            }

        exact = run(copy.deepcopy(model).double(), x.double(), dy.double())
        theirs = run(model, x, dy)
        packlora.accelerate(model, example={"x": x})
        return run(model, x, dy), theirs, exact

    assert_as_exact(draw, 8, SEED)


@pytest.mark.parametrize(
    ("base", "adapters", "autocast"),
    [(a, b, False) for a in (torch.float32, torch.bfloat16) for b in (torch.float32, torch.bfloat16)]
    + [(torch.float32, torch.float32, True)],
)
def test_a_whole_model_is_as_exact_as_peft(base: torch.dtype, adapters: torch.dtype, autocast: bool) -> None:
    """The mean over logits and gradients of the relative error, over four draws. Where adapters are wider than the base, PEFT
    computes them in float32 and here they are cast: then against PEFT with adapters of the base's dtype."""
    ours, theirs = [], []
    for draw in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(r=7, lora_alpha=9, target_modules="all-linear")
            model = get_peft_model(tiny_model("llama", base, seed=SEED + draw), config, autocast_adapter_dtype=False)
        fill(model, SEED + draw)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.bfloat16().to(adapters)
        exact = outcome(copy.deepcopy(model).double())
        plain = copy.deepcopy(model).to(base) if adapters == torch.float32 else copy.deepcopy(model)
        packlora.accelerate(model)
        for errors, one in ((theirs, plain), (ours, model)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                got = outcome(one)
            assert got.keys() == exact.keys()
            errors += [float((got[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact]
    assert sum(ours) <= 2 * sum(theirs) + 1e-6, f"{sum(ours):.3g} against {sum(theirs):.3g}, seed {SEED}"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_keeps_what_is_under_the_last_bit_of_bfloat16(autocast: bool) -> None:
    """PEFT adds it to a product that was rounded, where most of it is gone."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(500, 64, generator=generator).bfloat16()
    base = nn.Sequential(nn.Linear(64, 96, bias=False, dtype=torch.bfloat16))
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["0"])
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast)
    layer: Any = model.base_model.model[0]
    rest = x.double() @ layer.base_layer.weight.detach().double().T
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(generator=generator)
        low = (x.double() @ layer.lora_A["default"].weight.double().T) @ layer.lora_B["default"].weight.double().T
        layer.lora_B["default"].weight.mul_(2**-10 * float(rest.norm() / low.norm()))
        low = (x.double() @ layer.lora_A["default"].weight.double().T) @ layer.lora_B["default"].weight.double().T

    def share() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        assert y.dtype == torch.bfloat16
        return float(((y.detach().double() - rest) * low).sum() / low.square().sum())

    assert share() < 0.6
    packlora.accelerate(model)
    assert 0.7 < share() < 1.3, SEED


def test_siblings_run_in_one_call_and_x_is_kept_once(used: list[int]) -> None:
    model = lora()
    report = packlora.accelerate(model)
    model(input_ids=IDS)
    assert used == [3, 1, 2, 1] * 2
    assert [[path.rpartition(".")[2] for path in group] for group in report.groups] == [
        ["q_proj", "k_proj", "v_proj"],
        ["gate_proj", "up_proj"],
    ] * 2


CASES = [
    (base, adapter, x, autocast)
    for base in (torch.float32, torch.bfloat16, torch.float64)
    for adapter in (torch.float32, torch.bfloat16, torch.float64)
    for x in (torch.float32, torch.bfloat16, torch.float64)
    for autocast in (None, torch.bfloat16)
    if (x == base or autocast) and (torch.float64 not in (base, x, adapter) or base == x)
]


@pytest.mark.parametrize(("base", "adapter", "x_dtype", "autocast"), CASES)
def test_dtypes_of_outputs_and_gradients_are_peft_s(base: Any, adapter: Any, x_dtype: Any, autocast: Any) -> None:
    parent = Pair(8, 6).to(base)
    model = get_peft_model(parent, LoraConfig(r=3, target_modules=["a", "b"]), autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).to(adapter)
    x = torch.randn(5, 8).to(x_dtype).requires_grad_()

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            a, b = model(x)
        (a.double().sum() + b.double().square().sum()).backward()
        assert x.grad is not None
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [a.detach(), b.detach(), x.grad, *grads]

    want = run()
    assert packlora.accelerate(model, example={"x": x.detach().to(base)}).accelerated == 2
    got = run()
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in want]
    low = torch.bfloat16 in (base, x_dtype, adapter, autocast)
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= (0.05 if low else 1e-5) * float(other.abs().max())


class Pair(nn.Module):
    """Two linear layers that read the same x."""

    def __init__(self, K: int, N: int, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, N, bias), nn.Linear(K, N, bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def pair(K: int = 8, N: int = 6, **changes: Any) -> Any:
    model = get_peft_model(Pair(K, N), LoraConfig(**{"r": 3, "target_modules": ["a", "b"], **changes}))
    return fill(model.double()).train()


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "one token": lambda: torch.randn(8),
    "[T, K]": lambda: torch.randn(5, 8),
    "[2, 3, 4, K]": lambda: torch.randn(2, 3, 4, 8),
    "transposed": lambda: torch.randn(8, 5).T,
    "permuted": lambda: torch.randn(3, 8, 2).permute(2, 0, 1),
    "expanded": lambda: torch.randn(1, 8).expand(7, 8),
    "every second": lambda: torch.randn(6, 16)[:, ::2],
    "no tokens": lambda: torch.randn(0, 8),
    "no tokens of a batch": lambda: torch.randn(3, 0, 8),
}


@pytest.mark.parametrize("wants_gradient", [True, False])
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_x_of_any_shape_and_layout(make: Callable[[], torch.Tensor], wants_gradient: bool) -> None:
    model, x = pair(), make().double().requires_grad_(wants_gradient)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        a, b = model(x)
        (a.sin().sum() + (a * b).sum()).backward()
        return [
            a,
            b,
            *(p.grad for p in model.parameters() if p.grad is not None),
            *([x.grad] if wants_gradient else []),
        ]

    want = run()
    packlora.accelerate(model, example={"x": torch.randn(2, 8, dtype=torch.float64)})
    for one, other in zip(run(), want, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "a.lora", "b.lora", "lora"])
def test_frozen_operands_get_no_gradient_and_the_others_theirs(frozen: str) -> None:
    model, x = pair(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)

    def run() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        x.grad = None
        a, b = model(x)
        (a * b).sum().backward()
        return {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}

    want = run()
    packlora.accelerate(model, example={"x": x.detach()})
    got = run()
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        assert value is None or torch.allclose(got[name], value, rtol=1e-12, atol=1e-12)


def test_an_output_that_takes_no_part_in_the_loss_leaves_its_adapter_without_gradient() -> None:
    model, x = pair(), torch.randn(5, 8, dtype=torch.float64)
    packlora.accelerate(model, example={"x": x})
    model(x)[1].sum().backward()
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.grad is not None} == {"b"}


def test_outputs_may_be_changed_in_place() -> None:
    model, x = pair(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        a, b = model(x)
        a.mul_(2)
        b += a
        return torch.autograd.grad(b.square().sum(), [x, *(p for p in model.parameters() if p.requires_grad)])

    want = run()
    packlora.accelerate(model, example={"x": x.detach()})
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(run(), want, strict=True))


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_layer_may_be_called_with_and_without_autocast_in_turn(dora: bool) -> None:
    plain = lora(use_dora=dora).float()
    fast = copy.deepcopy(plain)
    packlora.accelerate(fast)
    for autocast in (False, True, False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, autocast):
            got, want = fast(input_ids=IDS).logits, plain(input_ids=IDS).logits
        assert got.dtype == want.dtype
        close = {"rtol": 0.05, "atol": 0.05 * float(want.abs().max())} if autocast else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(got, want, **close)


def test_no_cast_copy_of_a_base_weight_outlives_the_step() -> None:
    model, x = get_peft_model(Pair(8, 6), LoraConfig(r=3, target_modules=["a", "b"])), torch.randn(5, 8)
    packlora.accelerate(model, example={"x": x})
    with torch.autocast("cpu", torch.bfloat16):
        sum(model(x)).sum().backward()
    gc.collect()
    copies = [
        t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (6, 8) and t.dtype == torch.bfloat16
    ]
    assert copies == []


# --- dropout -----------------------------------------------------------------------------------------------------------


def mask_of(K: int, T: int, p: float, seed: int) -> torch.Tensor:
    """What dropout multiplies x with, [T, K], read from a layer whose low-rank product is drop(x) itself."""
    model = get_peft_model(
        Pair(K, K, bias=False), LoraConfig(r=K, lora_alpha=K, lora_dropout=p, target_modules=["a", "b"])
    )
    model = model.double().train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.eye(K, dtype=torch.float64) * ("lora" in name)
    packlora.accelerate(model, example={"x": torch.ones(2, K, dtype=torch.float64)})
    torch.manual_seed(seed)
    a, b = model(torch.ones(T, K, dtype=torch.float64))
    assert torch.equal(a, b), "siblings share a mask"
    return a.detach()


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_dropout_drops_at_its_rate_scales_the_rest_and_its_gradients_use_the_same_mask(p: float) -> None:
    T, K = 400, 32
    mask = mask_of(K, T, p, SEED)
    rate = float((mask == 0).double().mean())
    assert abs(rate - p) < 5 * (p * (1 - p) / (T * K)) ** 0.5
    assert torch.allclose(mask[mask != 0], torch.tensor(1 / (1 - p), dtype=torch.float64), rtol=1e-4)
    assert not torch.equal(mask, mask_of(K, T, p, SEED + 1))

    model, x = pair(K, 6, lora_dropout=p), torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    packlora.accelerate(model, example={"x": x.detach()})
    torch.manual_seed(SEED)
    got = model(x)
    layers = [model.base_model.model.a, model.base_model.model.b]
    want = []
    for layer in layers:
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        want.append(layer.base_layer(x) + layer.scaling["default"] * (x * mask) @ A.T @ B.T)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((a.sin() + a * b).sum(), leaves, retain_graph=True) for a, b in (got, want)]
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


def test_dropout_follows_the_seed_and_train_and_eval() -> None:
    model = lora(lora_dropout=0.3)
    plain = outcome(copy.deepcopy(model).eval())
    packlora.accelerate(model)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(outcome(model))
    assert_same(draws[0], draws[1], 0.0)
    assert not torch.equal(draws[0]["logits"], draws[2]["logits"])
    assert not torch.equal(draws[0]["logits"], plain["logits"])
    assert_same(outcome(model.eval()), plain)
    state = torch.random.get_rng_state()
    outcome(model)
    assert torch.equal(state, torch.random.get_rng_state()), "nothing is drawn in evaluation"


@pytest.mark.parametrize("rates", [(0.0, 0.5), (0.5, 0.0), (0.2, 0.5)])
def test_siblings_with_different_rates_keep_their_own(rates: tuple[float, float], used: list[int]) -> None:
    T, K = 300, 16
    model = get_peft_model(
        Pair(K, K), LoraConfig(r=K, lora_alpha=K, lora_dropout=0.1, target_modules=["a", "b"])
    ).train()
    layers = [model.base_model.model.a, model.base_model.model.b]
    for layer, p in zip(layers, rates, strict=True):
        layer.lora_dropout["default"].p = p
        layer.base_layer.weight.data.zero_()
        layer.base_layer.bias.data.zero_()
        layer.lora_A["default"].weight.data = torch.eye(K)
        layer.lora_B["default"].weight.data = torch.eye(K)
    packlora.accelerate(model, example={"x": torch.ones(2, K)})
    used.clear()
    for y, p in zip(model(torch.ones(T, K)), rates, strict=True):
        assert abs(float((y == 0).float().mean()) - p) < 5 * (p * (1 - p) / (T * K)) ** 0.5 + 1e-9
    assert used == [1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradient_checkpointing_draws_the_same_masks_again(p: float, reentrant: bool, used: list[int]) -> None:
    model = lora(lora_dropout=p)
    packlora.accelerate(model)
    torch.manual_seed(SEED)
    want = outcome(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    used.clear()
    torch.manual_seed(SEED)
    assert_same(outcome(model), want, 0.0)
    assert used == [3, 1, 2, 1] * 4


@pytest.mark.filterwarnings("ignore:packlora")
@pytest.mark.parametrize("dora", [False, True])
def test_layers_under_a_selective_checkpoint_are_peft_s(dora: bool, used: list[int]) -> None:
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    model = lora(use_dora=dora, depth=1)
    want = outcome(model)
    packlora.accelerate(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})
    assert_same(outcome(model), want)
    assert not used


# --- where PEFT's own forward stays ------------------------------------------------------------------------------------


def stand_aside(model: Any, part: str, inputs: dict[str, Any] | None = None, context: Any = None) -> Report:
    """The results are exactly PEFT's, and the reason is in the report and on paper."""
    import contextlib

    inputs = inputs or {}
    twin = copy.deepcopy(model)
    report = packlora.accelerate(model)
    for one in (twin, model):
        torch.manual_seed(0)
        one.zero_grad()
        with context(one) if context else contextlib.nullcontext():
            one.out = one(input_ids=IDS, **inputs).logits
        if one.out.requires_grad:
            one.out.square().mean().backward()
    assert torch.equal(model.out, twin.out)
    pairs = zip(model.named_parameters(), twin.named_parameters(), strict=True)
    for (name, parameter), (_, other) in pairs:
        assert (parameter.grad is None) == (other.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad), name
    if part:
        assert part in str(report)
        reasons = [module.reason for module in report.modules if module.reason is not None]
        assert reasons
        assert all(part in reason for reason in reasons)
    return report


def test_lora_bias(used: list[int]) -> None:
    stand_aside(lora("qwen2", target_modules=["q_proj", "v_proj"], lora_bias=True), "lora_bias is set")
    assert not used


def test_a_base_weight_that_is_trained_too(used: list[int]) -> None:
    model = lora()
    for name, parameter in model.named_parameters():
        if "q_proj.base_layer" in name or "up_proj.base_layer" in name:
            parameter.requires_grad_(True)
    report = packlora.accelerate(copy.deepcopy(model))
    assert {m.path.rpartition(".")[2]: m.reason for m in report.modules if m.reason} == {
        "q_proj": "its base weight is trained too", "up_proj": "its base weight is trained too",
    }  # fmt: skip
    want = outcome(copy.deepcopy(model))
    packlora.accelerate(model)
    used.clear()
    assert_same(outcome(model), want)
    assert used == [2, 1, 1, 1] * 2


def test_merged_and_disabled_and_several_adapters(used: list[int]) -> None:
    model = lora()
    model.merge_adapter()
    stand_aside(model, "its adapters are merged into the base weights")
    assert not used
    model = lora()
    model.base_model.disable_adapter_layers()
    stand_aside(model, "its adapters are disabled")
    assert not used
    model = lora()
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear"))
    fill(model.double())
    model.base_model.set_adapter(["default", "other"])
    stand_aside(model, "several adapters are active: default, other")
    assert not used


def test_adapter_names_of_a_mixed_batch(used: list[int]) -> None:
    model = lora().eval()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    fill(model.double())
    stand_aside(model, "", {"adapter_names": ["other", "__base__"]})
    assert not used


def test_the_disable_adapter_context(used: list[int]) -> None:
    stand_aside(lora(), "", context=lambda model: model.disable_adapter())
    assert not used


@pytest.mark.parametrize("where", ["lora_A", "lora_B", "base_layer", "lora_dropout"])
def test_hooks_inside_a_layer_are_called(where: str) -> None:
    model = lora(lora_dropout=0.1)
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    target = layer.base_layer if where == "base_layer" else getattr(layer, where)["default"]
    seen: list[tuple[int, ...]] = []
    target.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    report = packlora.accelerate(model)
    (left,) = [module for module in report.modules if module.reason]
    assert left.path.endswith("layers.0.self_attn.k_proj")
    assert "hooks" in str(left.reason)
    seen.clear()
    model(input_ids=IDS)
    assert len(seen) == 1


def test_modules_of_other_kinds_inside_a_layer(used: list[int]) -> None:
    class Quantised(nn.Linear):
        """As a quantised layer: a subclass of Linear whose weight means something else."""

    model = lora(lora_dropout=0.1).eval()
    attention = model.base_model.model.model.layers[0].self_attn
    attention.q_proj.base_layer.__class__ = Quantised
    torch.nn.utils.parametrize.register_parametrization(attention.k_proj.lora_A["default"], "weight", nn.Tanh())
    attention.v_proj.lora_dropout["default"] = nn.AlphaDropout(0.1).eval()
    attention.o_proj.lora_dropout["default"].p = 1.0
    want = outcome(copy.deepcopy(model))
    report = packlora.accelerate(model)
    reasons = {module.path.rpartition(".")[2]: module.reason for module in report.modules if module.reason}
    assert "Quantised, not torch.nn.Linear" in str(reasons.pop("q_proj"))
    assert "its lora_A is a" in str(reasons.pop("k_proj"))
    assert "AlphaDropout" in str(reasons.pop("v_proj"))
    assert not reasons
    used.clear()
    assert_same(outcome(model), want)
    assert used == [1, 2, 1, 3, 1, 2, 1]
    model.train()
    used.clear()
    model(input_ids=IDS)
    assert used == [2, 1, 3, 1, 2, 1], "p = 1 in training mode"


def test_embeddings_and_convolutions_and_other_tuners_are_left_alone_with_a_reason() -> None:
    model = lora(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    want = outcome(copy.deepcopy(model))
    report = packlora.accelerate(model)
    assert {(m.kind, m.reason) for m in report.modules} == {
        ("lora.Linear", None),
        ("lora.Embedding", "of a LoRA on an embedding PEFT looks up the rows of the tokens alone"),
        ("ModulesToSaveWrapper", "trained itself, not through LoRA"),
    }
    assert_same(outcome(model), want)

    convolution = get_peft_model(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)), LoraConfig(target_modules=["0", "2"])
    )
    report = packlora.accelerate(convolution, example={"input": torch.randn(1, 3, 4, 4)})
    assert [(m.kind, m.accelerated) for m in report.modules] == [("lora.Conv2d", False), ("lora.Linear", True)]

    other = get_peft_model(tiny_model("llama"), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    report = packlora.accelerate(other)
    assert report.accelerated == 0
    assert "ia3.Linear" in str(report)


def gpt2(**changes: Any) -> Any:
    """LoRA on all linear layers of a GPT-2, whose weights lie transposed, in float64."""
    config = transformers.GPT2Config(vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0)
    config.attn_pdrop = config.embd_pdrop = 0
    torch.manual_seed(SEED)
    targets = ["c_attn", "c_proj", "c_fc"]
    settings = {"r": 3, "lora_alpha": 5, "target_modules": targets, "fan_in_fan_out": True, **changes}
    return fill(get_peft_model(transformers.GPT2LMHeadModel(config), LoraConfig(**settings)).double()).train()


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "bias": "all"}, {"use_dora": True}], ids=str)
def test_transposed_weights_of_gpt2(settings: dict[str, Any], used: list[int]) -> None:
    """Trained, merged into tensors that are new, taken out again, and moved to another type and back."""
    model = gpt2(**settings)
    twin = copy.deepcopy(model)
    report = packlora.accelerate(model)
    assert report.accelerated == len(report.modules) == 8
    assert_same(outcome(model), outcome(twin))
    assert sum(used) == 8
    for one in (model, twin):
        one.merge_adapter(safe_merge=True)
        one.unmerge_adapter()
    assert_same(outcome(model), outcome(twin), 1e-10)
    for one in (model, twin):
        one.float().double()
        for layer in one.modules():
            if isinstance(layer, transformers.pytorch_utils.Conv1D):
                layer.weight.data = layer.weight.data * 1.5
    assert_same(outcome(copy.deepcopy(model)), outcome(twin), 1e-10)
    assert_same(outcome(model), outcome(twin), 1e-10)
    assert sum(used) == 4 * 8


def test_dropout_over_a_transposed_weight_is_that_of_the_operator_and_its_mean_is_the_evaluation() -> None:
    """Many draws of one layer: the mean is what evaluation gives, and two seeds differ."""
    layer = nn.Sequential(transformers.pytorch_utils.Conv1D(6, 8))
    model = fill(get_peft_model(layer, LoraConfig(r=3, lora_dropout=0.3, target_modules=["0"], fan_in_fan_out=True)))
    x = torch.randn(1, 8).expand(20000, 8)
    assert packlora.accelerate(model, example={"input": x}).accelerated == 1
    with torch.no_grad():
        want, dropped = model.eval()(x)[0], model.train()(x)
    assert not torch.equal(dropped[0], dropped[1])
    assert float((dropped.mean(0) - want).abs().max()) < 5 * float(dropped.std(0).max()) / 20000**0.5


# --- the life of a model -----------------------------------------------------------------------------------------------


def test_restore_puts_everything_back_and_a_second_accelerate_changes_nothing() -> None:
    model = lora()

    def state() -> list[Any]:
        return [
            (name, sorted(module.__dict__), dict(module._forward_hooks), dict(module._forward_pre_hooks),
             dict(module._forward_hooks_always_called), module.training)
            for name, module in model.named_modules()
        ]  # fmt: skip

    def contents() -> Any:
        return list(model.state_dict()), [(n, id(p), p.requires_grad) for n, p in model.named_parameters()]

    before, inside = state(), contents()
    packlora.restore(model)
    assert state() == before, "restoring what was not accelerated"
    first = str(packlora.accelerate(model))
    assert contents() == inside
    patched = [sorted(module.__dict__) for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert str(packlora.accelerate(model)) == first
    assert [sorted(module.__dict__) for module in model.modules()] == patched
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    packlora.restore(model)
    assert state() == before
    assert contents() == inside


def test_restore_also_reaches_a_layer_whose_forward_was_wrapped_since(used: list[int]) -> None:
    model = lora()
    packlora.accelerate(model)
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    used.clear()
    model(input_ids=IDS)
    assert used == [3, 1, 2, 1] * 2
    packlora.restore(model)
    used.clear()
    model(input_ids=IDS)
    assert not used
    report = packlora.accelerate(model)
    assert [m.reason for m in report.modules if m.reason] == ["its forward was replaced by other code"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_accelerated_by_itself_and_shares_nothing(how: str, used: list[int]) -> None:
    model = lora()
    want = outcome(model)
    model.zero_grad()
    packlora.accelerate(model)
    size = len(pickle.dumps(model))
    with torch.no_grad():
        model(input_ids=IDS)
    assert len(pickle.dumps(model)) == size, "nothing of a forward goes into copies"
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    used.clear()
    assert_same(outcome(other), want)
    assert used == [3, 1, 2, 1] * 2
    packlora.restore(other)
    used.clear()
    assert_same(outcome(other), want, 0.0)
    assert not used


def test_generation_with_a_cache_gives_the_same_tokens(used: list[int]) -> None:
    model = lora().eval()
    mask = torch.ones_like(IDS)
    want = model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=12, do_sample=False)
    packlora.accelerate(model)
    used.clear()
    assert torch.equal(model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=12, do_sample=False), want)
    assert len(used) == 12 * 8


def test_an_adapter_added_through_transformers_without_a_peft_model() -> None:
    model = tiny_model("llama", torch.float64)
    try:
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    except ValueError as error:
        if not str(error).startswith("The version of PEFT you are using is not compatible"):
            raise
        pytest.skip(f"transformers {transformers.__version__} beside PEFT {peft.__version__}: {error}")
    fill(model.double())
    want = outcome(model)
    assert packlora.accelerate(model).accelerated == 4
    assert_same(outcome(model), want)


# --- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [pytest.param(0.0, marks=pytest.mark.soak), 0.3])
def test_compiled_without_a_graph_break_it_gives_the_same(p: float) -> None:
    model = lora("qwen2", depth=1, lora_dropout=p, bias="all")
    want = outcome(copy.deepcopy(model))
    packlora.accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(**inputs: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(SEED)
        return {name.removeprefix("_orig_mod."): value for name, value in outcome(compiled, **inputs).items()}

    got = run()
    assert_same(run(), got, 0.0)
    if p == 0:
        assert_same(got, want, 1e-10)
    if SOAK:  # compiled once more, for any shape
        more = torch.randint(3, 320, (3, 14))
        assert run(input_ids=more, labels=more)["logits"].shape == (3, 14, 320)
    with pytest.raises(ValueError, match="compiled already"):
        packlora.accelerate(compiled)


def products_in_graphs(model: Any, **inputs: Any) -> int:
    """How many matrix products the forward graph of a model has that is compiled for these inputs."""
    counts: list[int] = []
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def counting(graph: Any, example: Any) -> Any:
        counts.append(sum(node.target in products for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=counting, bw_compiler=lambda graph, _: graph)
    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    (count,) = counts
    return count


@pytest.mark.soak
def test_compiled_siblings_read_their_input_once() -> None:
    """q, k and v share one product with the stacked A, gate and up another: three fewer a layer than apart, where each of seven
    layers takes three; one more is the output layer's."""
    model = lora("llama", depth=2 if SOAK else 1, target_modules="all-linear")
    ids = torch.randint(3, 320, (2, 6))
    depth = model.config.num_hidden_layers
    if SOAK:
        assert products_in_graphs(copy.deepcopy(model), input_ids=ids) == 21 * depth + 1
    packlora.accelerate(model)
    assert products_in_graphs(model, input_ids=ids) == 18 * depth + 1


# --- input that does not fit, and the report ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(5, 7, dtype=torch.float64), r"a: x must be \[\.\.\., 8\], got \[5, 7\]"),
        (torch.randn(5, 8), r"a: x is torch.float32; accepted with a base weight of torch.float64: torch.float64"),
        (torch.ones(5, 8, dtype=torch.long), "a: x is torch.int64; accepted"),
        (torch.randn(5, 8, dtype=torch.float64, device="meta"), "a: x is on meta, base weight on cpu"),
    ],
)
def test_x_that_does_not_fit_is_an_error_that_names_it(x: torch.Tensor, message: str) -> None:
    model = pair()
    packlora.accelerate(model, example={"x": torch.randn(2, 8, dtype=torch.float64)})
    with pytest.raises(ValueError, match=message):
        model(x)
    assert all(torch.isfinite(y).all() for y in model(torch.randn(2, 8, dtype=torch.float64)))


def test_what_has_no_adapters_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no PEFT adapter layers; accepted is a model from"):
        packlora.accelerate(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"the model is .*, not a torch.nn.Module; of a Trainer it is trainer.model"):
        packlora.accelerate([lora(depth=1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["recompute", "keep_outputs"])
def test_what_is_neither_true_nor_false_is_refused_and_leaves_the_model_as_it_was(name: str) -> None:
    model = lora(depth=1)
    before = str(packlora.accelerate(model))
    with pytest.raises(ValueError, match=f"{name} is 'no'; accepted are True and False"):
        packlora.accelerate(model, **{name: "no"})
    assert str(packlora.accelerate(model)) == before


def test_the_report_names_siblings_of_another_kind_apart() -> None:
    paths = ("l.0.q", "l.0.k", "l.0.v")
    kinds = ("lora.Linear", "lora.Linear", "lora.Linear4bit")
    modules = tuple(ModuleReport(path, kind, "p", paths) for path, kind in zip(paths, kinds, strict=True))
    assert str(Report(modules, (paths,))).splitlines()[1:] == [
        "  l.0.q, k", "      lora.Linear: plan p", "  l.0.v", "      lora.Linear4bit: plan p"
    ]  # fmt: skip


def test_the_report_names_every_module_once_with_its_plan_or_a_reason() -> None:
    model = lora(target_modules=["q_proj", "k_proj", "down_proj", "embed_tokens"])
    report = packlora.accelerate(model)
    layers = [
        path for path, module in model.named_modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)
    ]
    assert [module.path for module in report.modules] == layers
    assert all((module.plan is None) != (module.reason is None) for module in report.modules)
    prefix = "base_model.model.model."
    assert str(report).splitlines() == [
        "packlora: 6 of 7 adapted modules accelerated, 4 of them in 2 sibling groups",
        f"  {prefix}embed_tokens",
        "      lora.Embedding: PEFT's own forward: of a LoRA on an embedding PEFT looks up the rows of the tokens alone",
        f"  {prefix}layers.{{0-1}}.self_attn.q_proj, k_proj",
        "      lora.Linear: plan mm/after-mm/after (not measured, S 0.25 MiB, at 4096 tokens)",
        f"  {prefix}layers.{{0-1}}.mlp.down_proj",
        "      lora.Linear: plan mm/after-mm/after (not measured, S 0.125 MiB, at 4096 tokens)",
        "  cpu: plain matrix products, cpu has no Triton kernels",
    ]


def test_a_plan_may_be_given_and_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    original = peft_live.lora_group

    def seen(*args: Any) -> Any:
        plans.append(args[5])
        return original(*args)

    monkeypatch.setattr(peft_live, "lora_group", seen)
    model, plan = lora(), Plan(up="before", dx="before")
    want = outcome(model)
    assert plan.name in str(packlora.accelerate(model, plan=plan))
    assert_same(outcome(model), want)
    assert set(plans) == {plan}


def test_a_model_that_needs_another_example_says_so_and_works_layer_by_layer(used: list[int]) -> None:
    model = pair()
    report = packlora.accelerate(model)
    assert report.groups == ()
    assert (
        "sibling groups: none, the run that finds them failed (ValueError: the model's config names no vocab_size); "
        in str(report)
    )
    model(torch.randn(3, 8, dtype=torch.float64))
    assert used == [1, 1]
    report = packlora.accelerate(model, example={"x": torch.randn(2, 8, dtype=torch.float64)})
    assert len(report.groups) == 1


# --- the Trainer -------------------------------------------------------------------------------------------------------


def trained(tmp_path: Path, accelerated: bool, **changes: Any) -> tuple[list[dict[str, float]], Any]:
    from packlora.callbacks import ThroughputCallback

    seen: list[float] = []

    class After(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                seen.append(logs["tokens_per_second"])

    model = lora(dtype=torch.float32, **changes)
    if accelerated:
        packlora.accelerate(model)
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 320, (12,), generator=generator) for _ in range(16)]
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, seed=3, gradient_checkpointing=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=data, callbacks=[ThroughputCallback(), After()])
    trainer.train()
    assert len(seen) == settings.max_steps, "later callbacks see the figures too"
    return [entry for entry in trainer.state.log_history if "loss" in entry], model


def test_tokens_of_a_reference_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """DPOTrainer and KTOTrainer compute it by the same model in train mode, without gradients."""
    from packlora.callbacks import ThroughputCallback

    monkeypatch.setattr("packlora.callbacks.time.perf_counter", iter([0.0, 2.0]).__next__)
    model, callback, logs = lora(dtype=torch.float32).train(), ThroughputCallback(), {"loss": 1.0}
    callback.on_train_begin(None, None, None, model=model)
    callback.on_step_begin(None, None, None)
    ids = torch.arange(5, 17).view(2, 6)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            model(input_ids=ids)
    callback.on_log(None, transformers.TrainerState(), None, logs)
    assert logs["tokens_per_second"] == 6.0


def test_the_trainer_s_losses_are_the_same_and_its_logs_have_the_throughput(tmp_path: Path) -> None:
    want, _ = trained(tmp_path, False)
    got, model = trained(tmp_path, True)
    assert len(got) == 6
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["tokens_per_second"] > 0
        assert one["peak_memory_gib"] > 0
    assert want[-1]["loss"] < want[0]["loss"]
    assert not model._forward_pre_hooks
