"""Outputs that DoRA layers keep in place of a product of their own: only where nobody writes into them, and then never wrong.

Writers here go behind autograd's back, through .data, as kernels that work in place do. The oracle is PEFT under the same
writer: it keeps nothing that the writer writes into.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from test_accelerate import IDS, assert_same, fill, lora, outcome
from torch import nn
from transformers.models.llama import modeling_llama

import packlora
from packlora.adapters import outputs
from packlora.adapters.attach import attach, keep_outputs
from packlora.adapters.in_place import REPLACED, undo
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.base.packing import prepare_model
from packlora.live import accelerate as module
from packlora.live.layers import LayerForward

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def kept(model: Any) -> set[str]:
    """Last parts of the paths of the layers that keep their outputs, in every block."""
    forwards = [f for m in model.modules() if isinstance(f := m.__dict__.get("forward"), LayerForward)]
    assert forwards
    own = {f.path for f in forwards if f.keeps_output(torch.device("cpu"), f.layer.base_layer.weight.dtype)}
    names = {path.rpartition(".")[2] for path in own}
    assert own == {f.path for f in forwards if f.path.rpartition(".")[2] in names}
    return names


def line(report: Any) -> str:
    (found,) = [note for note in report.notes if note.startswith("DoRA")]
    return str(found)


# --- writers -----------------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class RotaryInPlace(torch.autograd.Function):
    """Writes into q and k in the forward."""

    @staticmethod
    def forward(ctx: Any, cos: torch.Tensor, sin: torch.Tensor, *qk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        for x in qk:
            x.data.copy_(rotated(x, cos, sin))
        return tuple(x.data for x in qk)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, None, *(rotated(grad, cos, -sin) for grad in grads)


def rotary_in_place(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return RotaryInPlace.apply(cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), q, k)


class GatedInPlace(torch.autograd.Function):
    """silu(gate) * up, whose backward writes the gradients where gate and up lie."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        sig = gate.sigmoid()
        d_up = grad * gate * sig
        gate.data.copy_(grad * up * (sig + gate * sig * (1 - sig)))
        up.data.copy_(d_up)
        return gate.data, up.data


def gated_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = self.down_proj(GatedInPlace.apply(self.gate_proj(x), self.up_proj(x)))
    return y


def forward_writer(patch: pytest.MonkeyPatch) -> set[str]:
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary_in_place)
    return {"q_proj", "k_proj"}


def backward_writer(patch: pytest.MonkeyPatch) -> set[str]:
    patch.setattr(modeling_llama.LlamaMLP, "forward", gated_in_place)
    return {"gate_proj", "up_proj"}


WRITERS = [forward_writer, backward_writer]


def wraps(names: list[str], write: Callable[[torch.Tensor], None]) -> Any:
    """A forward of LlamaMLP in which `write` gets the named layers' outputs."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        made = {}
        for name in ("gate_proj", "up_proj"):
            made[name] = getattr(self, name)(x)
            if name in names:
                write(made[name])
        y: torch.Tensor = self.down_proj(self.act_fn(made["gate_proj"]) * made["up_proj"])
        return y

    return forward


# --- found, and right -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_where_nobody_writes_all_outputs_are_kept_and_gradients_are_peft_s(family: str) -> None:
    model = lora(family, use_dora=True)
    want = outcome(model)
    report = packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == set(ALL)
    assert line(report) == (
        "DoRA: 14 of 14 layers keep their output for the gradient of the magnitude, not a product beside it"
    )
    assert_same(outcome(model), want)


@pytest.mark.parametrize("writer", WRITERS)
def test_outputs_that_are_written_into_are_not_kept_and_gradients_are_peft_s(
    writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora(use_dora=True)
    plain = outcome(model)
    written = writer(monkeypatch)
    want = outcome(model)
    assert_same(want, plain)  # the writers compute what they should
    report = packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == set(ALL) - written
    assert f"DoRA: {14 - 2 * len(written)} of 14 layers" in line(report)
    assert all(f"{{0-1}}.{path}" in line(report) for path in (
        [f"self_attn.{name}" for name in written] if writer is forward_writer else [f"mlp.{name}" for name in written]
    ))  # fmt: skip
    assert_same(outcome(model), want)

    monkeypatch.setattr(LayerForward, "keeps_output", lambda *_: True)
    wrong = outcome(model)
    differ = {name for name in want if float((wrong[name] - want[name]).abs().max()) > 1e-6}
    assert {name.split(".")[-4] for name in differ if "magnitude" in name} == written, "the writer would matter"


LigerSiLUMulFunction = type("LigerSiLUMulFunction", (GatedInPlace,), {})


def dispatched(gate: Any, up: Any) -> Any:
    return LigerSiLUMulFunction.apply(gate, up)


def gated_by_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
    return y


def dispatched_for_ever(gate: Any, up: Any) -> Any:
    return LigerSiLUMulFunction.apply(gate, up) if gate is not None else dispatched_for_ever(gate, up)


def gated_by_a_circle(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = self.down_proj(dispatched_for_ever(self.gate_proj(x), self.up_proj(x)))
    return y


def gated_by_dispatch(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = self.down_proj(dispatched(self.gate_proj(x), self.up_proj(x)))
    return y


@pytest.mark.parametrize("of", ["the class", "the instance"])
@pytest.mark.parametrize("forward", [gated_by_name, gated_by_dispatch], ids=["named", "dispatched"])
def test_liger_s_gated_activations_get_copies(forward: Any, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an autograd function of liger's name that writes into gate and up."""
    monkeypatch.setattr(dispatched, "__module__", "liger_kernel.transformers.swiglu")
    model = lora(use_dora=True)
    want = outcome(model)
    blocks = [module for module in model.modules() if isinstance(module, modeling_llama.LlamaMLP)]
    if of == "the class":
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    else:
        for block in blocks:
            block.forward = forward.__get__(block)
    before = [block.__dict__.get("forward") for block in blocks]
    for _ in range(2):  # a second call must not take the first one's for liger's
        report = packlora.accelerate(model, keep_outputs=True)
        assert kept(model) == set(ALL), str(report)
        assert "2 gated activations of liger's work on copies" in line(report)
        assert_same(outcome(model), want)
    packlora.restore(model)
    assert [block.__dict__.get("forward") for block in blocks] == before
    assert not any(REPLACED in module.__dict__ for module in model.modules())
    packlora.accelerate(model)
    assert [block.__dict__.get("forward") for block in blocks] == before, "only for the outputs' sake"
    assert_same(outcome(model), want)


def test_copies_are_for_outputs_that_are_kept_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_name)
    model = lora(use_dora=True, target_modules=["down_proj"])
    report = packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == {"down_proj"}
    assert "copies" not in line(report)
    assert not any(REPLACED in module.__dict__ for module in model.modules())


def test_what_others_put_in_a_spared_forward_s_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_name)
    model = lora(use_dora=True)
    packlora.accelerate(model, keep_outputs=True)
    first, second = (m for m in model.modules() if isinstance(m, modeling_llama.LlamaMLP))
    first.forward = wrapper = functools.partial(first.forward)
    del second.forward
    packlora.restore(model)
    assert first.__dict__["forward"] is wrapper and "forward" not in second.__dict__
    assert not any(REPLACED in module.__dict__ for module in model.modules())


def test_a_forward_of_another_object_and_functions_that_call_themselves_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatched_for_ever, "__module__", "liger_kernel.x")
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_a_circle)
    model = lora(use_dora=True)
    want = outcome(model)
    first, second = (m for m in model.modules() if isinstance(m, modeling_llama.LlamaMLP))
    helper = types.SimpleNamespace(down_proj=second.down_proj, gate_proj=second.gate_proj, up_proj=second.up_proj)
    second.forward = types.MethodType(gated_by_name, helper)
    report = packlora.accelerate(model, keep_outputs=True)
    assert REPLACED in first.__dict__ and REPLACED not in second.__dict__, str(report)
    assert_same(outcome(model), want)


def test_a_pickled_copy_of_a_spared_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_name)
    model = lora(use_dora=True)
    packlora.accelerate(model, keep_outputs=True)
    want = outcome(model)
    assert any(REPLACED in module.__dict__ for module in model.modules())
    other = pickle.loads(pickle.dumps(model))
    assert_same(outcome(other), want)
    packlora.restore(other)
    assert_same(outcome(other), want)


def test_compiled_models_take_the_activation_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_name)
    model = lora(use_dora=True)
    packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == set(ALL)
    want = outcome(model)
    model.compile(backend="aot_eager")
    assert_same(outcome(model), want)


@pytest.mark.parametrize("zeros", [False, True])
def test_layers_with_a_magnitude_of_0_keep_a_product(zeros: bool) -> None:
    """There y = g z tells nothing of z."""
    model = lora(use_dora=True)
    down = model.base_model.model.model.layers[1].mlp.down_proj
    if zeros:
        down.lora_magnitude_vector["default"].weight.data[3] = 0.0
    want = outcome(model)
    report = packlora.accelerate(model, keep_outputs=True)
    assert f"DoRA: {14 - zeros} of {14 - zeros} layers" in line(report)
    assert ("1 with a frozen bias, dropout or a magnitude of 0 keep it" in line(report)) == zeros
    assert_same(outcome(model), want)


def test_where_liger_s_gated_activations_are_not_between_such_layers_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_name)
    model = lora(use_dora=True, target_modules=["q_proj", "v_proj"])
    report = packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == {"q_proj", "v_proj"}
    assert "copies" not in line(report)
    assert not any(REPLACED in module.__dict__ for module in model.modules())


def test_nothing_of_an_output_s_size_is_kept_beside_the_outputs() -> None:
    """silu keeps gate and the product keeps up; the layer's own z are gone."""

    def saved(keep: bool) -> tuple[int, int]:
        model = lora(use_dora=True)
        packlora.accelerate(model, keep_outputs=keep)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found: dict[int, int] = {}
        alive = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                alive.append(tensor)
                found[storage.data_ptr()] = storage.size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=IDS, labels=IDS)
        width = IDS.numel() * 96 * 8
        return sum(found.values()), sum(size == width for size in found.values())

    (with_z, wide_with_z), (with_y, wide_with_y) = saved(False), saved(True)
    # 2 blocks, gate and up of width 96
    assert wide_with_z - wide_with_y == 4
    assert with_z - with_y >= 4 * IDS.numel() * 96 * 8


@pytest.mark.parametrize("when", ["longer", "padding", "training"])
def test_a_write_in_some_cases_only_is_seen(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        cases = {"longer": x.shape[-2] > 8, "padding": x.shape[0] > 1, "training": self.training}
        if cases[when]:
            up.data.mul_(1.5)
        y: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return y

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    model = lora(use_dora=True)
    want = outcome(model)
    packlora.accelerate(model.eval(), keep_outputs=True)
    assert kept(model) == set(ALL) - {"up_proj"}
    assert_same(outcome(model.train()), want)


def test_torch_s_own_operations_in_place_are_seen_even_where_they_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd would refuse the backward that PEFT's layers can do."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", wraps(["gate_proj"], lambda y: y.mul_(1.0)))
    model = lora(use_dora=True)
    want = outcome(model)
    packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == set(ALL) - {"gate_proj"}
    assert_same(outcome(model), want)


def test_outputs_that_leave_the_model_are_the_caller_s() -> None:
    """A loss may write where the logits lie."""
    model = lora(use_dora=True, target_modules=["lm_head", "down_proj"])

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=IDS).logits
        loss = logits.sin().sum()
        logits.data.fill_(7.0)
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == {"down_proj"}
    got = step()
    packlora.restore(model)
    assert_same(got, step())


def test_what_cannot_be_told_from_written_is_not_kept() -> None:
    """A fresh layer that gives zeros, and one that gives NaN."""
    for value in (0.0, torch.nan):
        model = lora(use_dora=True)
        layer = model.base_model.model.model.layers[1].mlp.down_proj
        layer.base_layer.weight.data.fill_(value)
        layer.lora_B["default"].weight.data.zero_()
        report = packlora.accelerate(model, keep_outputs=True)
        assert "13 of 14" in line(report)
        assert not layer.forward.keeps_output(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    model = lora(use_dora=True)
    want = outcome(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    report = packlora.accelerate(model, keep_outputs=True)
    if reentrant:
        assert "the run that watches them failed" in line(report)
    assert kept(model) == (set() if reentrant else set(ALL))
    assert_same(outcome(model), want)


# --- not assumed for ever ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a class", "a module", "a function", "a child"])
def test_code_that_is_replaced_afterwards_ends_it_with_a_warning(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Trainer does that applies liger to the model it gets."""
    model = lora(use_dora=True)
    packlora.accelerate(model, keep_outputs=True)
    assert_same(outcome(model), plain := outcome(model))
    layers = model.base_model.model.model.layers
    with monkeypatch.context() as patch:
        if how == "a class":
            backward_writer(patch)
        elif how == "a module":
            patch.setattr(layers[1].mlp, "forward", gated_in_place.__get__(layers[1].mlp), raising=False)
        elif how == "a function":
            forward_writer(patch)
        else:

            class Other(type(layers[0].mlp)):  # type: ignore[misc]
                forward = gated_in_place

            other = Other.__new__(Other)
            other.__dict__.update(layers[0].mlp.__dict__)
            patch.setitem(layers[0]._modules, "mlp", other)
        with pytest.warns(UserWarning, match=r"was replaced after packlora.accelerate\(model\)"):
            got = outcome(model)
        assert kept(model) == set()
        assert_same(got, plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(outcome(model), plain)
    layers[1].mlp.__dict__.pop("forward", None)
    outcome(model)
    assert kept(model) == set(ALL)


def test_kept_only_of_the_kind_that_was_watched() -> None:
    model = lora(dtype=torch.float32, use_dora=True)
    packlora.accelerate(model, keep_outputs=True)
    forward = model.base_model.model.model.layers[0].mlp.up_proj.forward
    assert forward.keeps_output(torch.device("cpu"), torch.float32)
    assert not forward.keeps_output(torch.device("cpu"), torch.bfloat16)
    assert not forward.keeps_output(torch.device("cuda", 0), torch.float32)


def test_copies_know_nothing_and_restore_takes_all_of_it_off() -> None:
    model = lora(use_dora=True)
    want = outcome(model)
    packlora.accelerate(model, keep_outputs=True)
    other = copy.deepcopy(model)
    assert kept(other) == set()
    assert_same(outcome(other), want)
    assert kept(model) == set(ALL)
    packlora.restore(model)
    for part in model.modules():
        assert not part._forward_pre_hooks
        assert not part._forward_hooks
        assert not part._forward_hooks_always_called
    assert_same(outcome(model), want, 0.0)


# --- the run that watches leaves no trace -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Everything that a run in train mode may move."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x)) * random.random() * np.random.rand()
        return self.last(torch.dropout(y, 0.5, self.training)) * 2  # type: ignore[no-any-return]


@pytest.fixture
def small() -> Any:
    settings = LoraConfig(r=2, use_dora=True, target_modules=["linear", "last"], modules_to_save=["norm"])
    return fill(get_peft_model(Net(), settings))


def test_modes_buffers_random_states_and_gradients_are_as_before(small: Any) -> None:
    small.train()
    small.base_model.model.last.eval()
    parameters = dict(small.named_parameters())
    trained = [p for p in parameters.values() if p.requires_grad]
    trained[0].grad = torch.randn_like(trained[0])
    old = trained[0].grad, trained[0].grad.clone()
    called: list[int] = []
    for p in trained:
        p.register_hook(lambda grad: called.append(1))
        p.register_post_accumulate_grad_hook(lambda p: called.append(2))
    x, modes = torch.randn(4, 6), [part.training for part in small.modules()]
    state = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    report = packlora.accelerate(small, example={"x": x}, keep_outputs=True)

    assert "DoRA: 2 of 2 layers keep" in line(report)
    assert any(True for _ in small.buffers())
    assert [part.training for part in small.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in small.state_dict().items())
    assert trained[0].grad is old[0]
    assert torch.equal(*old)
    assert all(p.grad is None for p in trained[1:])
    assert not called
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])
    assert all(
        not own.states for part in small.modules() if isinstance(own := part.__dict__.get("forward"), LayerForward)
    )


def test_an_example_that_fails_in_training_keeps_products_and_says_so(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.linear(x) if not self.training else 1 / 0

    monkeypatch.setattr(Net, "forward", forward)
    small.train()
    report = packlora.accelerate(small, example={"x": torch.randn(4, 6)}, keep_outputs=True)
    assert "failed (ZeroDivisionError: division by zero)" in line(report)
    assert kept(small) == set()
    assert all(part.training for part in small.modules())


def test_who_pays_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    monkeypatch.setattr(module, "untouched_outputs", lambda model, paths, examples: runs.append(len(paths)) or {})
    packlora.accelerate(lora(), keep_outputs=True)
    packlora.accelerate(lora(use_dora=True), keep_outputs=False)
    report = packlora.accelerate(lora(use_dora=True, lora_dropout=0.1), keep_outputs=True)
    assert runs == []
    assert line(report).endswith("14 with a frozen bias, dropout or a magnitude of 0 keep it")
    report = packlora.accelerate(lora("qwen2", use_dora=True), keep_outputs=True)
    assert runs == [8]
    assert line(report).endswith("; 6 with a frozen bias, dropout or a magnitude of 0 keep it")


@pytest.mark.parametrize("changes", [{"lora_dropout": 0.3}, {"bias": "all"}, {"bias": "lora_only"}])
def test_with_dropout_and_biases_gradients_are_peft_s(changes: dict[str, Any]) -> None:
    model = lora("qwen2", use_dora=True, **changes).eval()
    want = outcome(model)
    packlora.accelerate(model, keep_outputs=True)
    assert_same(outcome(model), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_write_shows_and_looking_is_no_write(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "CHUNK", 100)
    for trial in range(200):
        y = torch.randn(3, 5, 33).to(dtype)
        was, bits = y.clone(), outputs._bits(y)
        assert torch.equal(y, was)
        assert torch.equal(outputs._bits(y.transpose(0, 1).contiguous().transpose(0, 1)), bits)
        i, j = random.sample(range(33), 2)
        if trial % 3 == 0:
            y[2, 1, i] *= -1
        elif trial % 3 == 1:
            y[1, 4, [i, j]] = y[1, 4, [j, i]]
        else:
            y[[0, 2]] = y[[2, 0]]
        assert torch.equal(outputs._bits(y), bits) == torch.equal(y, was)


# --- jobs of packlora train ------------------------------------------------------------------------------------------------


JOBS = {
    "one": {"use_dora": True},
    "two": {},
    "three": {"use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj"]},
}


def jobs_on(model: Any) -> tuple[Any, list[Any]]:
    common = {"r": 3, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    specs = {name: resolve(LoraConfig(**(common | own)), model, name) for name, own in JOBS.items()}
    attached, adapters = attach(model, specs, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in adapters:
            for name, parameter in adapter.named_parameters().items():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 8
                parameter.mul_(1 + drawn) if name.endswith("magnitude") else parameter.copy_(drawn)
    return attached, adapters


def packed_gradients(model: Any, attached: Any, adapters: list[Any]) -> dict[str, torch.Tensor]:
    """Of every job, on packed samples: two of the first, one of each other."""
    owners, lengths = (0, 0, 1, 2), (9, 14, 11, 17)
    cuts = [0, *itertools.accumulate(lengths)]
    runs = tuple(zip(owners, cuts, cuts[1:], strict=False))
    ids = torch.randint(3, 100, (1, cuts[-1]), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    named = {f"{a.name}.{name}": p for a in adapters for name, p in a.named_parameters().items()}
    with attached.active(TokenOwners(cuts[-1], runs)):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, sample_lengths=lengths).logits
        grads = torch.autograd.grad(logits.sin().sum(), list(named.values()))
    return {"logits": logits.detach(), **dict(zip(named, grads, strict=True))}


def kept_by_jobs(model: Any) -> set[str]:
    layers = {path: m for path, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    return {path.rpartition(".")[2] for path, layer in layers.items() if layer.keep_output}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("writer", [None, "rotary", "gated", "liger"])
def test_jobs_keep_outputs_that_nobody_writes_into(
    writer: str | None, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("llama", torch.float64)
    prepare_model(model, checkpointing)
    attached, adapters = jobs_on(model)
    want = packed_gradients(model, attached, adapters)
    modes = [module.training for module in model.modules()]
    written: set[str] = set()
    if writer == "rotary":
        written = forward_writer(monkeypatch)
    elif writer == "gated":
        written = backward_writer(monkeypatch)
    elif writer == "liger":
        function = LigerSiLUMulFunction  # a name of the closure, as in packlora/liger.py
        for block in (m for m in model.modules() if isinstance(m, modeling_llama.LlamaMLP)):
            block.forward = types.MethodType(
                lambda self, x: self.down_proj(function.apply(self.gate_proj(x), self.up_proj(x))), block
            )
    found = keep_outputs(model, attached, adapters)
    assert found is not None and f"DoRA: {14 - 2 * len(written)} of 14 layers keep" in found, found
    assert kept_by_jobs(model) == set(ALL) - written
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for a in adapters for parameter in a.named_parameters().values())
    assert_same(packed_gradients(model, attached, adapters), want)

    if writer is not None and not checkpointing:
        undo(model)  # liger's may write again
        for module in model.modules():
            if isinstance(module, AdaptedLinear):
                module.keep_output = True
        wrong = packed_gradients(model, attached, adapters)
        assert any("magnitude" in name and float((wrong[name] - want[name]).abs().max()) > 1e-6 for name in want)


@pytest.mark.parametrize("why", ["bias", "dropout", "a magnitude of 0"])
def test_jobs_layers_that_cannot_do_without_a_product_say_so(why: str) -> None:
    model: Any = tiny_model("qwen2" if why == "bias" else "llama", torch.float64)
    prepare_model(model, False)
    spec = LoraConfig(
        r=3, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True, lora_dropout=0.1 * (why == "dropout")
    )
    attached, adapters = attach(model, {"one": resolve(spec, model, "one")}, 0)
    if why.endswith("0"):
        next(p for name, p in adapters[0].named_parameters().items() if name.endswith("magnitude")).data[2] = 0
    found = keep_outputs(model, attached, adapters)
    kept = {"bias": 8, "dropout": 0, "a magnitude of 0": 13}[why]
    assert found == (
        f"DoRA: {kept} of 14 layers keep their output for the gradient of the magnitude; "
        f"{14 - kept} with a bias, dropout or a magnitude of 0 keep a product"
    )


def test_jobs_without_dora_and_models_that_cannot_be_watched_keep_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama", torch.float64)
    prepare_model(model, False)
    attached, adapters = jobs_on(model)
    want = packed_gradients(model, attached, adapters)
    assert keep_outputs(model, attached, adapters[1:2]) is None
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", gated_by_name)
    planner = attached.planner
    with monkeypatch.context() as patch:
        patch.setattr("packlora.adapters.attach.untouched_outputs", lambda *_: 1 / 0)
        found = keep_outputs(model, attached, adapters)
    assert found == "DoRA: outputs are not kept, the run that watches them failed (ZeroDivisionError: division by zero)"
    assert kept_by_jobs(model) == set() and attached.planner is planner
    assert not any(REPLACED in module.__dict__ for module in model.modules())
    assert_same(packed_gradients(model, attached, adapters), want)
