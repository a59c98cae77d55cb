"""DoRA against real PEFT: every kind of layer under accelerate, adapter files in both directions, and the numerical traps.

All inputs, B and magnitudes are random and far from a fresh adapter's: there B = 0 and g = 1, and most errors do not show.
"""

from __future__ import annotations

import copy
import json
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from seeds import SEED
from test_accelerate import assert_same as assert_nearly
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import packlora
from packlora.adapters.attach import attach
from packlora.adapters.files import save_adapter
from packlora.adapters.reading import load_adapter
from packlora.adapters.spec import resolve
from packlora.config import Run
from packlora.config.adapter_file import config_notes, read_config
from packlora.export.merge import merge_adapter
from packlora.live.dora import PLAN
from packlora.ops.row_norm import torch_path

LAYERS = ["table", "one", "two", "grouped", "three"]
"""Of Net; "linear" and "turned" are layers.py's."""


class Net(nn.Module):
    """One layer of every kind that PEFT has DoRA for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12, padding_idx=0)
        self.one = nn.Conv1d(12, 8, 3, padding=1, stride=2)
        self.turned = Conv1D(10, 8)
        self.two = nn.Conv2d(1, 6, (3, 2), padding="same", bias=False)
        self.grouped = nn.Conv2d(6, 8, 3, groups=2)
        self.three = nn.Conv3d(2, 4, (2, 1, 1))
        self.linear = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.one(self.table(ids).transpose(1, 2)).transpose(1, 2).contiguous()
        h = self.grouped(self.two(self.turned(h).tanh()[:, None]))
        y: torch.Tensor = self.linear(self.three(h.unflatten(1, (2, 4))).movedim(1, -1))
        return y


assert_same = partial(assert_nearly, tolerance=1e-11)
IDS = torch.randint(0, 50, (3, 15), generator=torch.Generator().manual_seed(SEED))


def wrap(net: nn.Module, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A PEFT DoRA model in training mode; every trained tensor moved far from its start."""
    settings = {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": [*LAYERS, "turned", "linear"], **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(net, LoraConfig(**settings)).to(dtype)
    return perturb(model).train()


def perturb(model: Any) -> Any:
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name or tensor.requires_grad:
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(tensor * (1 + 0.2 * noise) + (0 if "magnitude" in name else 0.1 * noise))
    return model


def net(**changes: Any) -> Any:
    torch.manual_seed(SEED)
    return wrap(Net(), **changes)


def outcome(model: Any, seed: int = SEED, **inputs: Any) -> dict[str, torch.Tensor]:
    """The output and the gradients of all parameters, for a loss that is not symmetric in the outputs."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(**(inputs or {"ids": IDS}))
    out = getattr(out, "logits", out)
    (out.sin().double() * torch.arange(out.numel(), device=out.device).view(out.shape).cos()).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


def accelerated(model: Any, **example: Any) -> Any:
    """The model, with all of its adapters served here."""
    report = packlora.accelerate(model, example=example or {"ids": IDS})
    assert report.accelerated == len(report.modules), str(report)
    return model


# --- accelerate: every kind of layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_every_kind_of_layer_gives_peft_s_outputs_gradients_and_dropout_masks(
    dropout: float, bias: str, rslora: bool
) -> None:
    """Without the linear layers, whose dropout masks are the operator's: the others take PEFT's from torch's generator."""
    model = net(lora_dropout=dropout, bias=bias, use_rslora=rslora, target_modules=LAYERS)
    want, evaluated = outcome(model), outcome(model.eval())
    accelerated(model.train())
    assert_same(outcome(model), want)
    assert_same(outcome(model.eval()), evaluated)
    if dropout:
        assert not torch.equal(want["output"], evaluated["output"])
        assert not torch.equal(want["output"], outcome(model.train(), SEED + 1)["output"])
    packlora.restore(model.train())
    assert_same(outcome(model), want, tolerance=0.0)


def test_with_the_linear_layers_too() -> None:
    model = net()
    want = outcome(model)
    assert_same(outcome(accelerated(model)), want)


def test_a_layer_in_evaluation_drops_nothing_whatever_mode_its_dropout_is_in() -> None:
    model = net(lora_dropout=0.4, target_modules=LAYERS)
    for name in LAYERS:
        model.base_model.model.get_submodule(name).training = False
    want = outcome(model)
    assert_same(outcome(accelerated(model), SEED + 1), want)


@pytest.mark.parametrize("number", range(12))
def test_convolutions_of_any_settings(number: int) -> None:
    draw = random.Random(f"{SEED} {number}")
    D = draw.choice([1, 2, 3])
    groups = draw.choice([1, 1, 2, 3])
    kernel = draw.choices([1, 2, 3], k=D)
    same = draw.random() < 0.3
    settings: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": 1 if same else draw.choice([1, 2]),
        "padding": "same" if same else draw.choice([0, 1]),
        "groups": groups,
        "bias": draw.random() < 0.5,
    }
    torch.manual_seed(SEED + number)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[D - 1](
        groups * draw.choice([1, 3]), groups * draw.choice([1, 4]), **settings
    )
    model = wrap(nn.Sequential(layer), r=6, target_modules=["0"], lora_dropout=draw.choice([0.0, 0.4]))
    x = torch.randn(2, layer.in_channels, *[5] * D, dtype=torch.float64, requires_grad=True)
    want = outcome(model, input=x)
    assert x.grad is not None
    grad, x.grad = x.grad, None
    accelerated(model, input=x.detach())
    assert_same(outcome(model, input=x), want)
    assert torch.allclose(x.grad, grad, rtol=1e-11, atol=1e-11), settings


def test_an_embedding_that_scales_what_it_looks_up() -> None:
    """Gemma 3's; the norm is of the weight as it is stored."""
    model = tiny_model("gemma3", torch.float64)
    assert type(model.get_input_embeddings()) is not nn.Embedding
    model = wrap(model, target_modules=["embed_tokens"])
    ids = torch.randint(3, 320, (2, 7))
    want = outcome(model, input_ids=ids)
    assert_same(outcome(accelerated(model, input_ids=ids), input_ids=ids), want)


@pytest.mark.parametrize("changes", [{"scale_grad_by_freq": True}, {"padding_idx": 3}])
def test_an_embedding_s_options(changes: dict[str, Any]) -> None:
    torch.manual_seed(SEED)
    model = wrap(nn.Sequential(nn.Embedding(9, 5, **changes)), target_modules=["0"])
    ids = torch.tensor([[1, 3, 3, 8]])
    want = outcome(model, input=ids)
    assert_same(outcome(accelerated(model, input=ids), input=ids), want)


class Sizes(TorchDispatchMode):
    """The sizes of all tensors that operations make; views and the weights themselves do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.made += [
                t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)
            ]
        return out


WIDE: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "embedding": lambda: (nn.Embedding(400, 64), torch.tensor([[1, 2, 3]])),
    "Conv1D": lambda: (Conv1D(200, 150), torch.randn(2, 150)),
    "convolution": lambda: (nn.Conv2d(48, 56, 3), torch.randn(1, 48, 4, 4)),
}


@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
def test_a_forward_makes_nothing_of_the_weight_s_size(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_path.CHUNK_BYTES, "cpu", 4096)
    torch.manual_seed(SEED)
    layer, x = make()
    size = layer.weight.numel()  # type: ignore[union-attr, operator]
    model = wrap(nn.Sequential(layer), torch.float32, target_modules=["0"], fan_in_fan_out=isinstance(layer, Conv1D))
    with Sizes() as peft:
        want = model(x)
    assert max(peft.made) >= size, "PEFT does"
    accelerated(model, input=x)
    for _ in range(2):
        with Sizes() as ours:
            got = model(x)
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert max(ours.made) < size / 4


def test_norms_are_computed_once_per_change_of_the_adapter_and_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    from packlora.adapters import norms

    model = net(target_modules=LAYERS)
    twin = copy.deepcopy(model)
    accelerated(model)
    made: list[int] = []
    for name in ("row_norm", "row_norms"):
        original = getattr(norms, name, None)
        if original is not None:
            monkeypatch.setattr(norms, name, lambda *a, original=original, **k: (made.append(1), original(*a, **k))[1])

    def same() -> None:
        assert_same(outcome(model), outcome(twin))

    same()
    assert made, "the norms are seen here"
    made.clear()
    same()
    assert not made, "nothing has changed"
    changes: dict[str, Callable[[Any], Any]] = {
        "an optimizer step": lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.01).step(),
        "in place": lambda m: [p.mul_(1.1) for n, p in m.named_parameters() if "lora_A" in n or "embedding_A" in n],
        "load_state_dict": lambda m: m.load_state_dict({k: v * 1.05 for k, v in m.state_dict().items()}),
        "another tensor": lambda m: [setattr(p, "data", p.data * 0.9) for n, p in m.named_parameters() if "_B" in n],
        "through .data": lambda m: [p.data.mul_(1.2) for n, p in m.named_parameters() if "lora_" in n],
        "a new base weight": lambda m: m.base_model.model.two.base_layer.weight.mul_(3),
        "another dtype and back": lambda m: m.float().double(),
    }  # fmt: skip
    for what, change in changes.items():
        for one in (model, twin):
            with torch.no_grad():
                change(one)
        made.clear()
        try:
            same()
        except AssertionError as error:
            raise AssertionError(f"after {what}: {error}") from None
        assert made, what


DTYPES = [
    (torch.float32, torch.float32, None), (torch.bfloat16, torch.float32, None), (torch.bfloat16, torch.bfloat16, None),
    (torch.float32, torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("base", "adapter", "autocast"), DTYPES)
@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
def test_dtypes_are_peft_s_and_errors_within_twice_its_own(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], base: torch.dtype, adapter: torch.dtype, autocast: Any
) -> None:
    """Of outputs and gradients, the mean relative error against float64 over four draws; PEFT's with adapters of the base's
    dtype, since here A and B are cast to it."""
    ours: list[float] = []
    theirs: list[float] = []
    for draw in range(4):
        torch.manual_seed(SEED + draw)
        layer, x = make()
        changes = {"target_modules": ["0"], "fan_in_fan_out": isinstance(layer, Conv1D)}
        model = wrap(nn.Sequential(layer), torch.float32, **changes).to(base)
        x = x.to(base) if x.is_floating_point() else x
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.bfloat16().to(adapter)
        exact = outcome(copy.deepcopy(model).double(), input=x.double() if x.is_floating_point() else x)

        def run(model: Any, x: torch.Tensor = x) -> dict[str, torch.Tensor]:
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                return outcome(model, input=x)

        dtypes = {name: value.dtype for name, value in run(model).items()}
        plain = run(copy.deepcopy(model).to(base))
        got = run(accelerated(model, input=x))
        assert {name: value.dtype for name, value in got.items()} == dtypes
        for errors, one in ((theirs, plain), (ours, got)):
            errors += [float((one[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact]
    assert sum(ours) <= 2 * sum(theirs) + 1e-6, f"{sum(ours):.3g} against {sum(theirs):.3g}, seed {SEED}"


@pytest.mark.soak
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_without_graph_breaks_and_after_a_change_of_the_adapter(dropout: float) -> None:
    model = net(lora_dropout=dropout)
    twin = copy.deepcopy(model)
    compiled = torch.compile(accelerated(model), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        got, want = outcome(compiled), outcome(twin)
        if dropout:
            assert not torch.equal(got["output"], outcome(compiled, SEED + 1)["output"])
            with torch.no_grad():
                got, want = {"output": compiled.eval()(IDS)}, {"output": twin.eval()(IDS)}
            compiled.train(), twin.train()
        assert_same({name.removeprefix("_orig_mod."): value for name, value in got.items()}, want)
        with torch.no_grad():
            for one in (model, twin):
                for parameter in one.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.1)


def test_gradient_checkpointing_draws_the_same_masks_again() -> None:
    model = net(lora_dropout=0.3, target_modules=LAYERS)
    want = outcome(model)
    accelerated(model)
    inner = model.base_model.model
    original = inner.forward
    inner.forward = lambda ids: torch.utils.checkpoint.checkpoint(original, ids, use_reentrant=False)
    assert_same(outcome(model), want)


# --- accelerate: what is left to PEFT, and coming back ----------------------------------------------------------------


def reasons(model: Any) -> dict[str, str | None]:
    report = packlora.accelerate(model, example={"ids": IDS})
    return {module.path.rpartition(".")[2]: module.reason for module in report.modules}


def test_the_report_names_the_kept_norm() -> None:
    model = net()
    report = packlora.accelerate(model, example={"ids": IDS})
    assert {m.path.rpartition(".")[2] for m in report.modules if m.plan == PLAN} == set(LAYERS)
    assert re.search(rf"base_model.model.table\n +lora.Embedding: plan {PLAN}\n", str(report))


def test_plain_lora_on_these_layers_is_peft_s_own_and_the_report_says_so() -> None:
    model = net(use_dora=False)
    want = outcome(copy.deepcopy(model))
    found = reasons(model)
    assert found.pop("linear") is None
    assert found.pop("turned") is None
    assert found.pop("table") == "of a LoRA on an embedding PEFT looks up the rows of the tokens alone"
    assert set(found.values()) == {"of a LoRA on a convolution PEFT makes nothing of the weight's size"}
    assert_same(outcome(model), want)


def test_layers_that_cannot_be_served_say_why_and_give_exactly_peft_s_results() -> None:
    model = net(target_modules=[*LAYERS, "turned"])
    inner = model.base_model.model
    inner.one.base_layer.register_forward_hook(lambda *a: None)
    inner.turned.lora_magnitude_vector["default"].register_forward_hook(lambda *a: None)
    inner.two.lora_B["default"].register_forward_hook(lambda *a: None)
    inner.grouped.base_layer.padding_mode = "circular"
    inner.three.scaling["default"] = torch.tensor(1.5, dtype=torch.float64)
    inner.table.base_layer.max_norm = 1e6
    want = outcome(copy.deepcopy(model))
    assert reasons(model) == {
        "one": "its base layer has hooks or a replaced forward",
        "turned": "its lora_magnitude_vector has hooks or a replaced forward",
        "two": "its lora_B has hooks or a replaced forward",
        "grouped": "its base layer pads with circular, its lora_A with zeros",
        "three": "its scaling is a Tensor, not a number",
        "table": "max_norm is set on its base layer",
    }
    assert_same(outcome(model), want, tolerance=0.0)


def test_set_adapter_switches_between_dora_and_lora() -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter("plain", LoraConfig(r=2, target_modules=[*LAYERS, "linear"]))
        model.add_adapter("small", LoraConfig(r=2, use_dora=True, use_rslora=True, target_modules=["table", "linear"]))
    perturb(model.double())
    twin = copy.deepcopy(model)
    accelerated(model)
    for name in ("default", "plain", "small", "default", "small", "plain"):
        for one in (model, twin):
            one.set_adapter(name)
        assert_same(outcome(model), outcome(twin))
    for one in (model, twin):
        one.delete_adapter("default")
        one.set_adapter("small")
    assert_same(outcome(model), outcome(twin))


def test_weights_in_another_memory_format_are_seen_when_they_are_written_to() -> None:
    """Those of the base by load_state_dict, and A and B by an optimizer. Such weights are read by a copy."""
    models = [net(target_modules=["two", "grouped"]) for _ in range(2)]
    for name in ("two", "grouped"):
        models[1].base_model.model.get_submodule(name).to(memory_format=torch.channels_last)
    accelerated(models[1])
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m in models]
    for _ in range(3):
        want, found = map(outcome, models)
        assert_same(found, want)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            state = {key: 1.5 * own for key, own in model.state_dict().items() if "base_layer.weight" in key}
            model.load_state_dict(state, strict=False)


def test_another_scaling_changes_the_norm_too() -> None:
    model = net()
    twin = copy.deepcopy(model)
    before = outcome(accelerated(model))
    for one in (model, twin):
        for name in [*LAYERS, "linear"]:
            one.base_model.model.get_submodule(name).scale_layer(3.0)
    got = outcome(model)
    assert_same(got, outcome(twin))
    assert not torch.allclose(got["output"], before["output"])


def test_saved_and_loaded_by_peft_under_accelerate(tmp_path: Path) -> None:
    model = net()
    want = outcome(accelerated(model.float()))
    model.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(key.endswith("lora_magnitude_vector") for key in keys) == len(LAYERS) + 2
    torch.manual_seed(SEED)
    loaded = accelerated(PeftModel.from_pretrained(Net(), tmp_path, is_trainable=True))
    assert_same(outcome(loaded), want, tolerance=1e-6)
    model.load_adapter(tmp_path, "again", is_trainable=True)
    model.set_adapter("again")
    assert torch.allclose(outcome(model)["output"], want["output"], atol=1e-6)


# --- files: train -----------------------------------------------------------------------------------------------------


def peft_adapter(base: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A DoRA adapter that PEFT made and saved, moved far from its start."""
    torch.manual_seed(SEED)
    settings = {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear", **settings}
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=dtype), LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    perturb(model)
    model.save_pretrained(folder)
    return model.eval()


def attached_model(base: str, folder: Path | str) -> tuple[Any, Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    attached, (adapter,) = attach(model, {"job": resolve(read_config(str(folder), "job"), model, "job")}, SEED)
    load_adapter(folder, adapter)
    return model, attached, adapter


TOKENS = torch.randint(3, 320, (1, 37), generator=torch.Generator().manual_seed(SEED))


def test_an_adapter_stored_in_bfloat16_or_with_the_weight_suffix_gives_what_peft_gives(
    tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    base, folder = tiny_base("llama"), tmp_path / "old"
    peft_adapter(base, folder)
    file = folder / "adapter_model.safetensors"
    tensors = {key: value.bfloat16() for key, value in load_file(file).items()}
    for suffix in ("", ".weight"):
        save_file({key + (suffix if "magnitude" in key else ""): value for key, value in tensors.items()}, file)
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
        model, attached, adapter = attached_model(base, folder)
        assert {p.dtype for p in adapter.named_parameters().values()} == {torch.float32}
        with attached.only(0):
            torch.testing.assert_close(model(TOKENS).logits, theirs.eval()(TOKENS).logits, rtol=2e-5, atol=2e-5)


def test_magnitudes_start_as_exact_norms_where_peft_rounds_those_of_a_bfloat16_base() -> None:
    """PEFT makes the norm in the base's dtype: of a bfloat16 base it is off by up to 2^-8 of itself, and so is g from 1."""
    for dtype, theirs_within in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8 * 1.01)):
        model = tiny_model("llama", dtype, SEED)
        theirs = get_peft_model(
            copy.deepcopy(model), LoraConfig(use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        peft = LoraConfig(use_dora=True, target_modules="all-linear")
        weights = {
            name: module.weight.detach().double()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        _, (ours,) = attach(model, {"job": resolve(peft, model, "job")}, SEED)
        worst = 0.0
        for path, adapter in ours.weights.items():
            exact = weights[path].norm(dim=1)
            assert adapter.magnitude is not None
            assert adapter.magnitude.dtype == torch.float32
            assert float((adapter.magnitude.detach().double() / exact - 1).abs().max()) < 1e-6
            other = theirs.get_submodule(f"base_model.model.{path}").lora_magnitude_vector["default"].weight
            assert other.dtype == torch.float32
            worst = max(worst, float((other.detach().double() / exact - 1).abs().max()))
        assert worst <= theirs_within
        assert (worst > 1e-4) == (dtype == torch.bfloat16)


def test_merge_into_a_bfloat16_base_is_nearer_than_peft_s(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    """The sum here is float32 and rounded once: nearer to the exact one than PEFT's, on average."""
    base, dtype = str(tmp_path / "base"), torch.bfloat16
    first = AutoModelForCausalLM.from_pretrained(tiny_base("llama"), dtype=dtype)
    first.save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(tiny_base("llama")).save_pretrained(base)
    model = peft_adapter(base, tmp_path / "adapter", dtype)
    exact = copy.deepcopy(model).double().merge_and_unload().state_dict()
    theirs = model.merge_and_unload().state_dict()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    errors = [0.0, 0.0]
    for name, value in exact.items():
        assert ours[name].dtype == dtype
        for index, other in enumerate((ours[name], theirs[name])):
            errors[index] += float((other.double() - value).norm() / value.norm())
    assert errors[0] <= 1.001 * errors[1] + 1e-6


def test_a_fork_s_config_key_is_noted_and_the_adapter_loads(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    base = tiny_base("llama")
    want = peft_adapter(base, tmp_path)(TOKENS).logits
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config_notes(config) == []
    file.write_text(json.dumps({**config, "_dora_composition_version": 2, "brand_new": "x", "unused": None}))
    with pytest.warns(UserWarning, match="_dora_composition_version = 2 has no effect") as seen:
        model, attached, adapter = attached_model(base, tmp_path)
    assert any("brand_new = 'x' has no effect" in str(one.message) for one in seen)
    assert not any("unused" in str(one.message) for one in seen)
    with attached.only(0):
        torch.testing.assert_close(model(TOKENS).logits, want, rtol=2e-5, atol=2e-5)
    save_adapter(tmp_path / "again", adapter)
    assert config_notes(json.loads((tmp_path / "again" / "adapter_config.json").read_text())) == []
    with pytest.warns(UserWarning, match="_dora_composition_version"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)


# --- the traps --------------------------------------------------------------------------------------------------------


def single(kind: str, N: int = 6, **changes: Any) -> tuple[Any, Any, torch.Tensor]:
    """A model of one layer, the layer, and an x for it."""
    torch.manual_seed(SEED)
    layers: dict[str, tuple[Any, torch.Tensor]] = {
        "linear": (nn.Linear(8, N), torch.randn(5, 8)),
        "Conv1D": (Conv1D(N, 8), torch.randn(5, 8)),
        "convolution": (nn.Conv1d(8, N, 1), torch.randn(2, 8, 5)),
        "embedding": (nn.Embedding(9, N), torch.tensor([[0, 3, 8, 3]])),
    }
    layer, x = layers[kind]
    if getattr(layer, "bias", None) is not None:
        nn.init.normal_(layer.bias)
    model = wrap(nn.Sequential(layer), target_modules=["0"], fan_in_fan_out=kind == "Conv1D", **changes)
    return model, model.base_model.model[0], x.double() if x.is_floating_point() else x


ALL = ["linear", "Conv1D", "convolution", "embedding"]
BIASED = ["linear", "Conv1D", "convolution"]


def rows_of(layer: Any, kind: str) -> torch.Tensor:
    """The base weight as [N, K], a view."""
    weight: torch.Tensor = layer.base_layer.weight.data
    return weight.T if kind in ("Conv1D", "embedding") else weight.flatten(1)


def low_rank_of(layer: Any, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "embedding":
        return layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


@pytest.mark.parametrize("kind", ALL)
def test_fidelity_where_B_is_not_zero_and_m_is_not_the_norm(kind: str) -> None:
    """Against W' written out, not against PEFT: y = x (diag(m / ||W + s B A||) (W + s B A))' + bias."""
    model, layer, x = single(kind)
    A, B = (t.detach().flatten(1) for t in low_rank_of(layer, kind))
    merged = rows_of(layer, kind) + layer.scaling["default"] * B @ A
    m = layer.lora_magnitude_vector["default"].weight.detach().flatten()
    g = m / merged.norm(dim=1)
    assert float(B.abs().min()) > 0
    assert float((g - 1).abs().max()) > 0.05
    W = g[:, None] * merged
    if kind == "embedding":
        want = W.T[x]
    else:
        bias = layer.base_layer.bias.detach()
        x_TK = x.movedim(1, -1) if kind == "convolution" else x
        want = x_TK @ W.T + bias
        want = want.movedim(-1, 1) if kind == "convolution" else want
    accelerated(model, input=x)
    torch.testing.assert_close(model(x).detach(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
def test_g_near_one_survives_bfloat16(kind: str) -> None:
    """g = 1.003 lies between 1 and bfloat16's next number, 1.0078. The mean of y over many outputs tells which was used."""
    model, layer, _ = single(kind, N=64)
    rows = rows_of(layer, kind)
    model.bfloat16()
    norm = rows_of(layer, kind).double().norm(dim=1)
    for tensor in low_rank_of(layer, kind):
        tensor.data.zero_()
    holder = layer.lora_magnitude_vector["default"]
    holder.weight.data = (norm * 1.003).float().view(holder.weight.shape)
    if getattr(layer.base_layer, "bias", None) is not None:
        layer.base_layer.bias.data.zero_()
    x = {
        "linear": torch.randn(512, 8), "Conv1D": torch.randn(512, 8), "convolution": torch.randn(4, 8, 128),
        "embedding": torch.arange(9),
    }[kind]  # fmt: skip
    x = x.bfloat16() if x.is_floating_point() else x
    base = copy.deepcopy(layer.base_layer).double()(x.double() if x.is_floating_point() else x).detach()
    accelerated(model, input=x)
    y = model(x).detach().double()
    assert model(x).dtype == torch.bfloat16
    g = float((y * base).sum() / (base * base).sum())
    slack = 5 * 2**-9 * float((base**2).square().sum().sqrt() / (base * base).sum())
    assert slack < 0.0015
    assert abs(g - 1.003) < slack, f"g looks like {g:.5f}"
    assert rows.shape == rows_of(layer, kind).shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ALL)
def test_zero_rows_give_the_bias_and_finite_gradients(kind: str, dtype: torch.dtype) -> None:
    model, layer, x = single(kind)
    rows_of(layer, kind)[2] = 0
    low_rank_of(layer, kind)[1].data[2] = 0
    model.to(dtype)
    x = x.to(dtype).requires_grad_() if x.is_floating_point() else x
    theirs = outcome(copy.deepcopy(model), input=x)
    assert not all(value.isfinite().all() for value in theirs.values()), "PEFT divides by zero"
    if x.is_floating_point():
        x.grad = None
    got = outcome(accelerated(model, input=x.detach()), input=x)
    assert all(value.isfinite().all() for value in got.values())
    if x.is_floating_point():
        assert x.grad is not None
        assert x.grad.isfinite().all()
    y = got["output"].select(1 if kind == "convolution" else -1, 2)
    bias = getattr(layer.base_layer, "bias", None)
    assert (y == (0 if bias is None else bias[2])).all()


@pytest.mark.parametrize("kind", BIASED)
def test_dropout_is_applied_to_the_base_product_of_dora_and_only_there(kind: str) -> None:
    """y = base(x) + bias + (g - 1) base(xd) + g s low(xd). The mask is read from the layer: with A the identity's first rows it
    would be seen in low, here it is found by solving for xd, so nothing is assumed about who draws it."""
    model, layer, _ = single(kind, N=8, lora_dropout=0.4)
    x_TK = torch.randn(6, 8, dtype=torch.float64)
    x = x_TK.T[None].contiguous() if kind == "convolution" else x_TK
    accelerated(model, input=x)
    torch.manual_seed(SEED)
    y = model(x).detach()
    y_TN = y[0].T if kind == "convolution" else y
    A, B = (t.detach().flatten(1) for t in low_rank_of(layer, kind))
    W, s, bias = rows_of(layer, kind), layer.scaling["default"], layer.base_layer.bias.detach()
    g = layer.lora_magnitude_vector["default"].weight.detach().flatten() / (W + s * B @ A).norm(dim=1)
    rest = y_TN - x_TK @ W.T - bias  # = xd ((g - 1) W + g s B A)'
    xd = torch.linalg.solve((g - 1)[:, None] * W + g[:, None] * s * B @ A, rest.T).T
    ratio = xd / x_TK
    kept = ratio.abs() > 0.5
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(ratio, kept.double() / 0.6, rtol=1e-4, atol=1e-5)


def zero_row_llama(dtype: torch.dtype) -> Any:
    """Rows of o_proj that are zero, as in Llama 3.1 8B."""
    model = tiny_model("llama", dtype, SEED)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[[1, 17, 40]] = 0
    return model


def test_zero_rows_of_llama_s_o_proj_are_trained_and_merged(
    tiny_base: Callable[..., str], write_rows: Callable[..., str], tmp_path: Path
) -> None:
    base = str(tmp_path / "base")
    zero_row_llama(torch.float32).save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(tiny_base("llama")).save_pretrained(base)
    adapter = {"r": 2, "use_dora": True, "target_modules": ["o_proj", "up_proj"]}
    job = {"name": "job", "data": {"path": write_rows("rows")}, "adapter": adapter}
    job["train"] = {"max_steps": 3, "learning_rate": 1e-3, "global_batch_size": 4}
    tree = {"base_model": base, "output_dir": str(tmp_path / "out"), "device": "cpu", "max_tokens_per_microbatch": 128}
    result = packlora.train(Run.model_validate({**tree, "jobs": [job]}))
    assert result.status == "done"
    saved = load_file(tmp_path / "out/job/adapter_model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())
    merge_adapter(tmp_path / "out/job", tmp_path / "merged", base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged(TOKENS).logits.isfinite().all()
    model, attached, _ = attached_model(base, tmp_path / "out/job")
    with attached.only(0):
        torch.testing.assert_close(model(TOKENS).logits, merged(TOKENS).logits, rtol=2e-5, atol=2e-5)
