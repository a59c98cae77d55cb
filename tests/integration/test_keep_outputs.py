"""Outputs that DoRA layers keep in the place of a product, where it is asked for: never a gradient that is silently wrong by an
operation of torch or a kernel of liger's.

Writers here go behind autograd's back, through .data, as kernels that work in place do. The oracle is PEFT under the same
writer: it keeps nothing that the writer writes into.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig
from test_accelerate import IDS, assert_same, lora, outcome
from torch import nn
from transformers.models.llama import modeling_llama

import packlora
from packlora.adapters.attach import attach
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.base import liger
from packlora.base.model import prepare_model
from packlora.live.layers import LayerForward
from packlora.runtime.keep_outputs import keep_outputs

ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def forwards(model: Any) -> list[LayerForward]:
    found = [f for m in model.modules() if isinstance(f := m.__dict__.get("_packlora"), LayerForward)]
    assert found
    return found


def kept(model: Any) -> set[str]:
    """Last parts of the paths of the layers that keep their outputs, in every block."""
    own = {f.path for f in forwards(model) if f.keeps_output()}
    names = {path.rpartition(".")[2] for path in own}
    assert own == {f.path for f in forwards(model) if f.path.rpartition(".")[2] in names}
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


def rotary_writer(patch: pytest.MonkeyPatch) -> set[str]:
    """As liger's apply_liger_kernel_to_llama(rope=True) does it: in the modeling file, of which nobody knows who calls it."""
    patch.setattr(rotary_in_place, "__module__", "liger_kernel.transformers.rope")
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary_in_place)
    return {"q_proj", "k_proj"}


def gated_writer(patch: pytest.MonkeyPatch) -> set[str]:
    """As liger's apply_liger_kernel_to_llama(swiglu=True) does it."""
    patch.setattr(gated_in_place, "__module__", "liger_kernel.transformers.swiglu")
    patch.setattr(modeling_llama.LlamaMLP, "forward", gated_in_place)
    return {"gate_proj", "up_proj"}


WRITERS = [rotary_writer, gated_writer]
LEFT = {rotary_writer: {"q_proj", "k_proj", "gate_proj", "up_proj"}, gated_writer: {"gate_proj", "up_proj"}}
"""What keeps a product where they write."""


def own_liger(model: Any, patch: pytest.MonkeyPatch) -> set[str]:
    """The liger option of run files, on stand-ins for liger's kernels."""

    class Rope:
        @staticmethod
        def apply(q: Any, k: Any, cos: Any, sin: Any, _: None, unsqueeze_dim: int) -> Any:
            return rotary_in_place(q, k, cos, sin, unsqueeze_dim)

    def wrong(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x + 1

    ops = types.ModuleType("liger_kernel.ops")
    fakes = {"LigerSiLUMulFunction": GatedInPlace, "LigerRopeFunction": Rope}
    for name in ("LigerSiLUMulFunction", "LigerGELUMulFunction", "LigerRopeFunction"):
        setattr(ops, name, fakes.get(name, SimpleNamespace(apply=wrong)))
    patch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    patch.setitem(sys.modules, "liger_kernel.ops", ops)
    patch.setattr(liger, "check_liger", lambda setting, device, dtype: True)
    patch.setitem(liger.ERROR, torch.float64, 1e-12)
    assert liger.use_liger(model, True) == ["2 LlamaAttention", "2 LlamaMLP"]
    return {"q_proj", "k_proj", "gate_proj", "up_proj"}


# --- kept, and right -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_where_nobody_writes_all_outputs_are_kept_and_gradients_are_peft_s(family: str) -> None:
    model = lora(family, use_dora=True)
    want = outcome(model)
    report = packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == ALL
    assert line(report) == "DoRA: 14 of 14 layers keep their output for the gradient of the magnitude"
    assert_same(outcome(model), want)


def test_none_is_kept_unless_it_is_asked_for_or_without_dora() -> None:
    model = lora(use_dora=True)
    report = packlora.accelerate(model)
    assert kept(model) == set()
    assert not any("DoRA" in note for note in report.notes)
    report = packlora.accelerate(lora(), keep_outputs=True)
    assert not any("DoRA" in note for note in report.notes)


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


@pytest.mark.parametrize("zeros", [False, True])
def test_layers_with_a_magnitude_of_0_keep_a_product(zeros: bool) -> None:
    """There y = g z tells nothing of z."""
    model = lora(use_dora=True)
    down = model.base_model.model.model.layers[1].mlp.down_proj
    if zeros:
        down.lora_magnitude_vector["default"].weight.data[3] = 0.0
    want = outcome(model)
    report = packlora.accelerate(model, keep_outputs=True)
    assert f"DoRA: {14 - zeros} of 14 layers" in line(report)
    assert ("; 1 keep a product: they have a magnitude of 0" in line(report)) == zeros
    assert_same(outcome(model), want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    model = lora(use_dora=True)
    want = outcome(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    packlora.accelerate(model, keep_outputs=True)
    assert kept(model) == ALL
    assert_same(outcome(model), want)


# --- written into ----------------------------------------------------------------------------------------------------------


TORCH_S_OWN = {
    "all of it": lambda y: y.mul_(1.0),
    "one element": lambda y: y[0, 1, 2].add_(1.0),
    "a view": lambda y: y.view(-1).sub_(0.5),
    "without gradient": lambda y: y.detach().fill_(2.0),
}


@pytest.mark.parametrize("write", TORCH_S_OWN.values(), ids=TORCH_S_OWN.keys())
def test_autograd_refuses_a_backward_whose_output_an_operation_of_torch_wrote_into(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        write(gate)
        return self.down_proj(torch.sin(gate.clone()) * self.up_proj(x))  # type: ignore[no-any-return]

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    model = lora(use_dora=True)
    want = outcome(model)
    packlora.accelerate(model)
    assert_same(outcome(model), want)
    packlora.accelerate(model, keep_outputs=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(model)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("later", [False, True], ids=["before", "after accelerate"])
def test_outputs_that_liger_s_kernels_overwrite_are_not_kept_and_gradients_are_peft_s(
    writer: Any, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later: as a Trainer does that applies liger to the model it gets."""
    model = lora(use_dora=True)
    plain = outcome(model)
    with monkeypatch.context() as patch:
        written = writer(patch)
        want = outcome(model)
        assert_same(want, plain)  # the writers compute what they should
        if not later:
            report = packlora.accelerate(model, keep_outputs=True)
            number = 2 * len(LEFT[writer])
            assert f"DoRA: {14 - number} of 14 layers" in line(report)
            assert f"; {number} keep a product: they have an output that may be overwritten unseen" in line(report)
    if later:
        packlora.accelerate(model, keep_outputs=True)
        assert kept(model) == ALL
    writer(monkeypatch)
    assert kept(model) == ALL - LEFT[writer]
    assert_same(outcome(model), want)

    monkeypatch.setattr(LayerForward, "keeps_output", lambda *_: True)
    wrong = outcome(model)
    differ = {name for name in want if float((wrong[name] - want[name]).abs().max()) > 1e-6}
    assert {name.split(".")[-4] for name in differ if "magnitude" in name} == written, "the writer would matter"


def test_one_module_on_liger_is_told_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As liger puts its forward on the modules of a model that is there already."""
    model = lora(use_dora=True)
    want = outcome(model)
    packlora.accelerate(model, keep_outputs=True)
    monkeypatch.setattr(gated_in_place, "__module__", "liger_kernel.transformers.swiglu")
    mlp = model.base_model.model.model.layers[1].mlp
    mlp.forward = types.MethodType(gated_in_place, mlp)
    left = {f.path.partition("layers.")[2] for f in forwards(model) if not f.keeps_output()}
    assert left == {"1.mlp.gate_proj", "1.mlp.up_proj"}
    assert_same(outcome(model), want)


def test_the_output_layer_keeps_a_product_for_losses_overwrite_logits() -> None:
    model = lora(use_dora=True, target_modules=["lm_head", "down_proj"])
    assert "2 of 3 layers keep" in line(packlora.accelerate(model, keep_outputs=True))
    assert kept(model) == {"down_proj"}


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
@pytest.mark.parametrize("writer", [None, "rotary", "gated", "own liger"])
def test_jobs_keep_outputs_that_liger_s_kernels_do_not_overwrite(
    writer: str | None, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("llama", torch.float64)
    prepare_model(model, checkpointing)
    left: set[str] = set()
    if writer == "own liger":
        left = own_liger(model, monkeypatch)
    attached, adapters = jobs_on(model)
    want = packed_gradients(model, attached, adapters)
    assert kept_by_jobs(model) == set(), "unless it is asked for"
    for name, write in zip(("rotary", "gated"), WRITERS, strict=True):
        if writer == name:
            write(monkeypatch)
            left = LEFT[write]
    found = keep_outputs(model)
    assert found is not None and f"DoRA: {14 - 2 * len(left)} of 14 layers keep" in found, found
    assert kept_by_jobs(model) == ALL - left
    assert_same(packed_gradients(model, attached, adapters), want)

    if writer is not None and not checkpointing:
        for module in model.modules():
            if isinstance(module, AdaptedLinear):
                module.keep_output = True
        wrong = packed_gradients(model, attached, adapters)
        assert any("magnitude" in name and float((wrong[name] - want[name]).abs().max()) > 1e-6 for name in want)


@pytest.mark.parametrize("why", ["a bias", "dropout", "a magnitude of 0"])
def test_jobs_layers_that_cannot_do_without_a_product_say_so(why: str) -> None:
    model: Any = tiny_model("qwen2" if why == "a bias" else "llama", torch.float64)
    prepare_model(model, False)
    spec = LoraConfig(
        r=3, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True, lora_dropout=0.1 * (why == "dropout")
    )
    _, adapters = attach(model, {"one": resolve(spec, model, "one")}, 0)
    if why.endswith("0"):
        next(p for name, p in adapters[0].named_parameters().items() if name.endswith("magnitude")).data[2] = 0
    number = {"a bias": 8, "dropout": 0, "a magnitude of 0": 13}[why]
    assert keep_outputs(model) == (
        f"DoRA: {number} of 14 layers keep their output for the gradient of the magnitude; "
        f"{14 - number} keep a product: they have {why}"
    )


def test_jobs_without_dora_have_nothing_to_say() -> None:
    model: Any = tiny_model("llama", torch.float64)
    prepare_model(model, False)
    spec = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    attach(model, {"one": resolve(spec, model, "one")}, 0)
    assert keep_outputs(model) is None


@pytest.mark.parametrize("asked", [False, True])
def test_the_run_file_s_key(asked: bool, tiny_base: Any, write_rows: Any, tmp_path: Path) -> None:
    job = {
        "name": "one",
        "adapter": {"r": 2, "use_dora": True, "lora_dropout": 0.0},
        "data": {"path": write_rows("one", 6)},
    }
    run = {"base_model": tiny_base(), "output_dir": str(tmp_path / "out"), "device": "cpu", "jobs": [job]}
    packlora.train(run | ({"keep_outputs": True} if asked else {}), max_steps=1)
    found = json.loads((tmp_path / "out" / "run.json").read_text())["model"]["kept_outputs"]
    assert (found is not None) == asked
    assert not asked or found.startswith("DoRA: 14 of 14 layers keep their output")
