"""packlora.accelerate on models whose weights are in parts: transformers' tensor parallelism, ZeRO, and what gathers them."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed import DistributedConfig
from wrapped import SMALL, Case, adapted, blocks, data, difference, said_of

import packlora

Pool = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore")


# --- transformers' tensor parallelism ----------------------------------------------------------------------------------

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def loaded(folder: str, parallel: bool, targets: list[str], **settings: Any) -> Any:
    """A PEFT model with adapters that matter, its base in one piece or in two."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    more = {"distributed_config": DistributedConfig(tp_size=2)} if parallel else {}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **more)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, **settings)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)
    return model.train()


def trained(model: Any, steps: int = 3) -> dict[str, torch.Tensor]:
    """Whole outputs, gradients and parameters of a training on the same data on every rank."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    found = {}
    for step in range(steps):
        out = model(input_ids=data(0, step), labels=data(0, step))
        out.loss.backward()
        found[f"{step} logits"] = full(out.logits)
        found |= {f"{step} {name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found["evaluated"] = full(model(input_ids=data(0, 9)).logits)
    return found | {name: full(p) for name, p in model.named_parameters() if "lora_" in name}


def tensor_parallel(rank: int, folder: str, targets: list[str]) -> dict[str, Any]:
    want = trained(loaded(folder, False, targets))
    failed = ""
    try:
        trained(loaded(folder, True, targets), 1)
    except RuntimeError as error:
        failed = str(error)
    model = loaded(folder, True, targets)
    report = packlora.accelerate(model)
    got = trained(model)
    saved = f"{folder}/adapter"
    model.save_pretrained(saved, is_main_process=rank == 0)
    dist.barrier()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    plain = PeftModel.from_pretrained(base, saved, autocast_adapter_dtype=False)
    with torch.no_grad():
        off = float((plain(input_ids=data(0, 9)).logits - got["evaluated"]).abs().max())
    calls = report.served().values()
    return {
        "worst": difference(got, want), "failed": failed, "notes": report.notes, "groups": report.groups,
        "reasons": {module.reason for module in report.modules}, "served": {one.served for one in calls},
        "left": {reason for one in calls for reason in one.left}, "reloaded": off,
    }  # fmt: skip


@pytest.fixture
def base_folder(tmp_path: Path) -> str:
    tiny_model("llama", torch.float64, **SMALL).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "up_proj"]], ids=["all", "columns"])
def test_a_tensor_parallel_model_trains_like_one_process_and_is_peft_s(
    targets: list[str], ranks: Pool, base_folder: str
) -> None:
    """PEFT alone fails at rows from transformers 5.21 on: then the widths are put right, and the report says so."""
    assert said_of("tensor parallelism of transformers (`tp_plan`, `DistributedConfig`), LoRA") == "PEFT"
    for found in ranks(2).run(tensor_parallel, base_folder, targets):
        assert found["worst"][0] < 1e-10, found["worst"]
        assert found["reloaded"] < 1e-10
        assert found["served"] == {0}
        assert found["left"] == found["reasons"]
        assert all("tensor parallel" in reason and transformers.__version__ in reason for reason in found["reasons"])
        assert found["groups"] == ()
        (note,) = [note for note in found["notes"] if note.startswith("tensor parallel: ")]
        assert "no DoRA" in note
        assert ("put right" in note) == (found["failed"] != "") or targets != ALL
        assert not (found["failed"] and targets != ALL)


def no_dora(rank: int, folder: str) -> str:
    try:
        loaded(folder, True, ["q_proj"], use_dora=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_dora_on_a_tensor_parallel_model_fails_loudly_in_peft(ranks: Pool, base_folder: str) -> None:
    """As the report says of such a model; there is none that accelerate() could get."""
    assert said_of("tensor parallelism of transformers, DoRA") == "none"
    for said in ranks(2).run(no_dora, base_folder):
        assert "DTensor" in said


# --- ZeRO --------------------------------------------------------------------------------------------------------------


class Partitioned:
    """As ZeRO-3 holds a model: its large parameters are empty, and whole from the forward of their module to the end of the
    step. Every module has hooks, from the moment on at which the engine holds the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for number, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape, parameter.ds_tensor = number, parameter.shape, parameter.data  # type: ignore[attr-defined]
        self.release()

    def hold(self) -> None:
        for module in self.model.modules():
            module.register_forward_pre_hook(self.gather)

    @staticmethod
    def gather(module: Any, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.ds_tensor  # type: ignore[attr-defined]

    def release(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
            if not parameter.requires_grad:  # those of adapters are small
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.ds_tensor.sub_(parameter.grad, alpha=0.1)  # type: ignore[attr-defined]
        self.release()


def three_steps(model: Any, engine: Partitioned | Flat) -> dict[str, torch.Tensor]:
    """Logits and gradients of three steps that the engine takes."""
    found = {}
    for step in range(3):
        out = model(input_ids=data(0, step), labels=data(0, step))
        out.loss.backward()
        found[f"{step} logits"] = out.logits.detach()
        found |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        engine.step()
    return found


def zero_3(when: str, dora: bool, accelerated: bool) -> tuple[dict[str, torch.Tensor], Any]:
    model, report = adapted(Case("none", dora=dora)), None
    if accelerated and when == "before":
        report = packlora.accelerate(model)
    engine = Partitioned(model)
    if accelerated and when == "loaded":
        report = packlora.accelerate(model)
    engine.hold()
    if accelerated and when == "after":
        report = packlora.accelerate(model, recompute=True, keep_outputs=True)
        engine.release()
    found = three_steps(model, engine)
    return found | {name: p.ds_tensor.clone() for name, p in model.named_parameters()}, report  # type: ignore[attr-defined]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("when", ["before", "loaded", "after"])
def test_under_zero_3_every_call_is_peft_s_bit_for_bit_and_the_reason_is_said(when: str, dora: bool) -> None:
    assert said_of("DeepSpeed ZeRO-3") == "PEFT"
    want, _ = zero_3(when, dora, False)
    got, report = zero_3(when, dora, True)
    assert difference(got, want)[0] == 0.0
    calls = report.served().values()
    assert {one.served for one in calls} == {0}
    (reason,) = {reason for one in calls for reason in one.left}
    assert "ZeRO-3" in reason
    if when == "after":
        assert {module.reason for module in report.modules} == {reason}
    if when == "loaded":
        said = {module.reason for module in report.modules}
        assert said == {
            "the weight of its base layer is partitioned by DeepSpeed's ZeRO-3; ZeRO-2 and FSDP2 are computed here"
        }
        assert report.notes == (
            "sibling groups: none, the model's parameters are partitioned by DeepSpeed's ZeRO-3, and its engine does not hold "
            "the model yet",
        )


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [1, 2]}], ids=str
)
def test_embeddings_and_rows_that_zero_3_has_partitioned_are_not_called_accelerated(settings: dict[str, Any]) -> None:
    model = adapted(Case("none", dora="target_modules" in settings, settings=tuple(settings.items())))
    Partitioned(model)
    report = packlora.accelerate(model)
    assert report.accelerated == 0
    (embedding,) = [module for module in report.modules if "embed_tokens" in module.path]
    assert "partitioned by DeepSpeed's ZeRO-3" in embedding.reason


class Flat:
    """As ZeRO-1 and 2 hold parameters: views of one tensor, which a step writes without a trace on the host."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.flat = torch.cat([p.data.flatten() for p in self.trained])
        at = 0
        for p in self.trained:
            p.data = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    def step(self) -> None:
        grads = torch.cat([p.grad.flatten() for p in self.trained if p.grad is not None])
        self.flat.data.sub_(grads, alpha=0.1)
        for p in self.trained:
            p.grad = None


def zero_1(dora: bool, when: str) -> tuple[dict[str, torch.Tensor], Any]:
    model, report = adapted(Case("none", dora=dora)), None
    if when == "before":
        report = packlora.accelerate(model)
    engine = Flat(model)
    if when == "after":
        report = packlora.accelerate(model)
    found = three_steps(model, engine)
    return found | {name: p.detach().clone() for name, p in model.named_parameters()}, report


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_where_parameters_are_views_of_a_flat_tensor_as_in_zero_1_all_is_computed_here(when: str, dora: bool) -> None:
    assert said_of("DeepSpeed ZeRO-1") == "operator"
    want, _ = zero_1(dora, "")
    got, report = zero_1(dora, when)
    worst, where = difference(got, want)
    assert worst < 1e-10, where
    assert {one.served for one in report.served().values()} == {3}


# --- weights that are gathered by blocks --------------------------------------------------------------------------------


class Gathered:
    """Parameters of a block are whole while the block runs, forward and backward, each time in other memory."""

    def __init__(self, model: Any) -> None:
        for block in blocks(model):
            kept = [(p, p.data.clone()) for p in block.parameters()]
            block.register_forward_pre_hook(self.gathers(kept))
            block.register_forward_hook(self.releases(kept))
            block.register_full_backward_pre_hook(self.gathers(kept))
            block.register_full_backward_hook(self.releases(kept))
            self.releases(kept)()

    @staticmethod
    def gathers(kept: list[tuple[nn.Parameter, torch.Tensor]]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for parameter, value in kept:
                parameter.data = value.clone()

        return hook

    @staticmethod
    def releases(kept: list[tuple[nn.Parameter, torch.Tensor]]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for parameter, value in kept:
                parameter.data = torch.empty(0, dtype=value.dtype)

        return hook


def gathered(dora: bool, when: str) -> tuple[dict[str, torch.Tensor], Any]:
    model, report = adapted(Case("none", dora=dora)), None
    model.enable_input_require_grads()
    if when == "before":
        report = packlora.accelerate(model)
    Gathered(model)
    if when == "after":
        report = packlora.accelerate(model)
    found = {}
    for step in range(3):
        grads: dict[str, torch.Tensor] = {}

        def keep(gradient: torch.Tensor, name: str, into: dict[str, torch.Tensor]) -> None:
            into[name] = gradient.clone()

        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        handles = [p.register_hook(functools.partial(keep, name=name, into=grads)) for name, p in trained]
        out = model(input_ids=data(0, step), labels=data(0, step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out.loss.backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()
        found[f"{step} logits"] = out.logits.detach()
        found |= {f"{step} {name}": own for name, own in grads.items()}
    return found, report


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_are_whole_only_while_their_block_runs_are_read_where_they_are_then(when: str, dora: bool) -> None:
    want, _ = gathered(dora, "")
    assert len(want) == 3 * (1 + 14 * (3 if dora else 2))
    got, report = gathered(dora, when)
    worst, where = difference(got, want)
    assert worst < 1e-10, where
    assert report.accelerated == 14
    assert {one.served for one in report.served().values()} == {3}
