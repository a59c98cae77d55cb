"""Jobs that train embeddings, output layers, copies of modules and rows of tokens: beside each other, each as by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, tiny_model
from packed import PackedSample, parts
from peft import LoraConfig, PeftModel
from torch.utils._python_dispatch import TorchDispatchMode

from packlora.adapters.attach import Adapter, attach, attach_one, detach_one
from packlora.adapters.files import save_adapter
from packlora.adapters.kinds.copy import Weights as CopyWeights
from packlora.adapters.spec import ModuleSpec, resolve
from packlora.base.model import Base, prepare_model
from packlora.data.encode import Sample
from packlora.engine.passes import SingleDevice, run_microbatch
from packlora.ops.cross_entropy import chunked
from packlora.ops.dropout import dropout
from packlora.ops.dropout.keys import layer_salt, packed_token_keys
from packlora.plans.select import PlanChooser

LINEAR = ["q_proj", "down_proj"]
JOBS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": [*LINEAR, "embed_tokens"], "use_rslora": True},
    "linear": {"target_modules": LINEAR, "lora_dropout": 0.3},
    "dora embedding and head": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True},
    "dropped head": {"target_modules": ["lm_head", "o_proj"], "lora_dropout": 0.4},
    "dropped dora head": {"target_modules": ["lm_head"], "lora_dropout": 0.25, "use_dora": True},
    "copies": {"target_modules": LINEAR, "modules_to_save": ["norm", "lm_head"]},
    "copied embedding": {"target_modules": LINEAR, "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": LINEAR, "trainable_token_indices": [7, 250, 31, 0]},
    "tokens of both": {"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [9, 8], "lm_head": [8, 200]}},
}  # fmt: skip
TIED: dict[str, dict[str, Any]] = {
    "tokens": {"target_modules": LINEAR, "trainable_token_indices": [7, 250, 31, 0]},
    "head": {"target_modules": ["lm_head", "v_proj"], "lora_dropout": 0.2},
    "scaled embedding": {"target_modules": [*LINEAR, "embed_tokens"]},
    "scaled dora embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "copied embedding": {"target_modules": LINEAR, "modules_to_save": ["embed_tokens"]},
    "copied head": {"target_modules": LINEAR, "modules_to_save": ["lm_head"]},
    "different tokens": {"target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [9, 8], "lm_head": [8]}},
}  # fmt: skip
TURNED: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear", "lora_dropout": 0.3}, "dora": {"target_modules": ["c_attn"], "use_dora": True},
    "biases": {"target_modules": ["c_fc", "c_proj"], "bias": "lora_only"},
    "places": {"target_modules": ["c_fc"], "modules_to_save": ["ln_f", "ln_1"], "trainable_token_indices": [7, 9]},
}  # fmt: skip
"""Of layers whose weights lie transposed."""
LENGTHS = [19, 7, 23]
KEY, STEP = 12345, 3


class Masked(torch.nn.Module):
    """In the place of PEFT's dropout of a layer: the mask that a job draws for it."""

    def __init__(self, salt: int, p: float) -> None:
        super().__init__()
        self.salt, self.p, self.keys_T2 = salt, p, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x[0], self.keys_T2, self.salt, self.p)[None]


class Beside:
    """Jobs on one model, with parameters far from where they begin."""

    def __init__(self, make: Callable[[], Any], jobs: dict[str, dict[str, Any]], fused: bool) -> None:
        self.make = make
        model = self.make()
        prepare_model(model, False)
        configs = {name: LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **job) for name, job in jobs.items()}
        self.specs = {name: resolve(config, model, name) for name, config in configs.items()}
        self.attached, self.adapters = attach(model, self.specs, 0)
        self.model = model
        with torch.no_grad():
            for adapter in self.adapters:
                for parameter in adapter.named_parameters().values():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        self.device = SingleDevice(Base(model, Any, torch.device("cpu"), "random", [], fused_loss=fused), self.attached)
        generator = np.random.default_rng(0)
        self.samples = []
        for adapter in self.adapters:
            for number, length in enumerate(LENGTHS):
                ids = generator.integers(0, TINY["vocab_size"], length)
                ids[3:6] = [7, 0, 9]
                labels = np.arange(length) > 2 + number
                self.samples.append(
                    PackedSample(adapter.number, Sample(ids, labels), number, STEP, KEY + adapter.number)
                )

    def peft(self, adapter: Adapter, folder: Path) -> Any:
        """PEFT's model of what an adapter's folder holds."""
        save_adapter(folder, adapter)
        base = self.make()
        base.set_attn_implementation("sdpa")  # the other one computes in float32
        torch.set_default_dtype(torch.float64)  # of the parameters that PEFT makes
        try:
            model = PeftModel.from_pretrained(base, str(folder), is_trainable=True, autocast_adapter_dtype=False)
        finally:
            torch.set_default_dtype(torch.float32)
        model.train()
        for path, layer in model.named_modules():
            drops = getattr(layer, "lora_dropout", None)
            if drops and isinstance(drops["default"], torch.nn.Dropout):
                own = path.removeprefix("base_model.model.")
                drops["default"] = Masked(layer_salt(self.attached.groups.get(own, (own,))[0]), drops["default"].p)
        return model

    def gradients(self, adapter: Adapter, model: Any, weight: float) -> tuple[float, dict[str, torch.Tensor]]:
        """PEFT's sum of losses, and its gradients by the names of its parameters."""
        total = 0.0
        for item in self.samples:
            if item.owner != adapter.number:
                continue
            keys = packed_token_keys([KEY + adapter.number], [STEP], [item.number], [item.sample.num_tokens])
            for module in model.modules():
                if isinstance(module, Masked):
                    module.keys_T2 = torch.from_numpy(keys)
            ids = torch.from_numpy(item.sample.ids).long()[None]
            labels = torch.where(torch.from_numpy(item.sample.is_label), ids[0], -100)[1:]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (loss * weight).backward()
            total += loss.item()
        return total, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def ours(adapter: Adapter, own: str) -> str:
    """PEFT's name of a parameter."""
    path, _, leaf = own.rpartition("/")
    spec = adapter.spec.modules[path]
    if spec.kind == "linear" and leaf == "bias":
        return f"base_model.model.{path}.{'base_layer.' * bool(spec.rank)}bias"
    magnitude = "lora_magnitude_vector.default.weight"
    ends: dict[str, dict[str, str]] = {
        "linear": {"A": "lora_A.default.weight", "B": "lora_B.default.weight", "magnitude": magnitude},
        "embedding": {"A": "lora_embedding_A.default", "B": "lora_embedding_B.default", "magnitude": magnitude},
        "copy": {name: f"modules_to_save.default.{name.replace('norm', 'weight')}" for name in ("norm", "weight", "bias")},
        "tokens": {"tokens": "token_adapter.trainable_tokens_delta.default"},
    }  # fmt: skip
    return f"base_model.model.{path}.{ends[spec.kind][leaf]}"


def hold_against_peft(beside: Beside, tmp_path: Path) -> None:
    weights = np.linspace(0.1, 0.3, len(beside.adapters))
    result = run_microbatch(beside.device, parts(beside.samples, weights))
    for adapter in beside.adapters:
        model = beside.peft(adapter, tmp_path / str(adapter.number))
        loss, grads = beside.gradients(adapter, model, float(weights[adapter.number]))
        assert abs(float(result.sums[adapter.number]) - loss) < 1e-10 * loss, adapter.name
        own = {ours(adapter, name): p.grad for name, p in adapter.named_parameters().items()}
        assert own.keys() == grads.keys(), adapter.name
        for name, grad in grads.items():
            largest = float(grad.abs().max())
            assert largest > 0 and float((own[name] - grad).abs().max()) < 1e-10 * max(largest, 1), (adapter.name, name)


def qwen() -> Any:
    return tiny_model("qwen3", torch.float64, tie_word_embeddings=False)


def gemma() -> Any:
    return tiny_model("gemma3", torch.float64, pad_token_id=31)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=64,
        vocab_size=320,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        bos_token_id=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("fused", [True, False], ids=["in chunks", "whole logits"])
def test_losses_and_gradients_are_those_of_peft(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chunked, "CHUNK_BYTES", {"cpu": 320 * 8 * 50}
    )  # several chunks, whose borders lie inside of jobs
    hold_against_peft(Beside(qwen, JOBS, fused), tmp_path)


@pytest.mark.parametrize(
    ("make", "jobs"), [(gemma, TIED), (gpt2, TURNED)], ids=["output tied to embedding", "transposed weights"]
)
def test_the_same_where_weights_are_tied_scaled_or_transposed(make: Any, jobs: Any, tmp_path: Path) -> None:
    hold_against_peft(Beside(make, jobs, fused=True), tmp_path)


@pytest.mark.parametrize("beside", ["q_proj", "v_proj"])
def test_norms_of_heads_in_a_first_microbatch_of_as_many_tokens_as_heads(beside: str, tmp_path: Path) -> None:
    """16, with the tokens that fill up a row."""
    jobs = {name: {"target_modules": [beside], "modules_to_save": ["q_norm"]} for name in ("a", "b")}
    found = Beside(lambda: tiny_model("qwen3", torch.float64, num_attention_heads=16), jobs, fused=True)
    found.samples = [item for item in found.samples if item.sample.num_tokens == 7]
    hold_against_peft(found, tmp_path)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_jobs_come_and_go_whatever_others_have_on_the_same_modules(checkpointing: bool) -> None:
    """An output layer with a copy of one job and a low-rank adapter of another, whichever came first and whichever is left."""
    names = ["copies", "dropped head", "tokens of both", "embedding"]

    def gradients(order: list[str], gone: list[str]) -> dict[str, torch.Tensor]:
        model = qwen()
        prepare_model(model, checkpointing)
        configs = {name: LoraConfig(r=3, task_type="CAUSAL_LM", **JOBS[name]) for name in order}
        specs = {name: resolve(config, model, name) for name, config in configs.items()}
        attached, adapters = attach(model, {order[0]: specs[order[0]]}, 0)
        chooser = PlanChooser(model.device)
        choosers = {path: chooser for spec in specs.values() for path in spec.modules}
        for number, name in enumerate(order[1:], 1):
            adapters.append(attach_one(model, attached, name, number, specs[name], 0, choosers))
        for adapter in adapters:
            with torch.no_grad():
                for parameter in adapter.named_parameters().values():
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                    parameter.add_(0.1 * noise)
            if adapter.name in gone:
                detach_one(model, adapter.number)
        device = SingleDevice(Base(model, Any, torch.device("cpu"), "random", [], fused_loss=True), attached)
        generator = np.random.default_rng(1)
        rows = {name: Sample(generator.integers(0, 320, 20), np.arange(20) > 5) for name in names}
        samples = [
            PackedSample(a.number, rows[a.name], 0, STEP, KEY + len(a.name)) for a in adapters if a.name not in gone
        ]
        run_microbatch(device, parts(samples))
        return {
            f"{a.name} {name}": parameter.grad
            for a in adapters if a.name not in gone for name, parameter in a.named_parameters().items()
        }  # fmt: skip

    whole = gradients(names, [])
    assert sum(float(grad.abs().max()) > 0 for grad in whole.values()) > len(whole) - 3  # tokens that do not occur
    for order, gone in (
        (names[::-1], []),
        (names, ["copies"]),
        (names[::-1], ["dropped head", "embedding"]),
        (names[1:2], []),
    ):
        for name, grad in gradients(order, gone).items():
            assert float((grad - whole[name]).abs().max()) < 1e-10 * max(1, float(whole[name].abs().max())), name


def test_a_nan_of_one_job_is_no_other_jobs() -> None:
    beside = Beside(qwen, JOBS, fused=True)
    weights = np.ones(len(beside.adapters))
    run_microbatch(beside.device, parts(beside.samples, weights))
    healthy = {a.name: {n: p.grad.clone() for n, p in a.named_parameters().items()} for a in beside.adapters}
    for broken in ("dora embedding and head", "copies"):
        for adapter in beside.adapters:
            for parameter in adapter.named_parameters().values():
                parameter.grad = None
        parameters = next(a for a in beside.adapters if a.name == broken).named_parameters()
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(torch.nan)
        result = run_microbatch(beside.device, parts(beside.samples, weights))
        for adapter in beside.adapters:
            if adapter.name == broken:
                assert result.sums[adapter.number].isnan()
                continue
            for name, parameter in adapter.named_parameters().items():
                assert float((parameter.grad - healthy[adapter.name][name]).abs().max()) < 1e-10, (adapter.name, name)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])


def test_logits_of_all_rows_are_held_at_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, largest = Beside(qwen, JOBS, fused=True), 0
    rows = sum(int(item.sample.is_label.sum()) for item in beside.samples)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": 320 * 8 * 50})

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == TINY["vocab_size"]:
                    largest = max(largest, tensor.numel() // TINY["vocab_size"])
            return out

    with Sizes():
        run_microbatch(beside.device, parts(beside.samples))
    assert 0 < largest < rows / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_a_small_change_of_a_copied_norm_is_not_lost(dtype: torch.dtype) -> None:
    """Under half of the last bit of 1, beside which it is."""
    small, width = 2e-4, 64
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(width, dtype=dtype)
    spec, room = ModuleSpec(0, 1.0, 0.0, False, False, kind="copy"), {"norm": torch.full((width,), 1 + small)}
    copy, x = CopyWeights(spec, norm, 0, room), torch.randn(20000, width).to(dtype)
    exact = torch.nn.functional.rms_norm(x.double(), (width,))
    gain = ((copy.forward(norm, x, None).double() - exact) * exact).sum() / exact.square().sum()
    assert abs(float(gain) - small) < small / 2
