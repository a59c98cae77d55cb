"""packlora.accelerate under DDP, FSDP2 and FSDP1: the numbers of PEFT under the same wrapper, or PEFT's forward and why."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import Ranks
from seeds import SOAK
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from wrapped import (
    SMALL,
    STEPS,
    WRAPPERS,
    Answer,
    Case,
    adapted,
    answers,
    blocks,
    clean,
    data,
    difference,
    life,
    local,
    said_of,
    sharded,
)

import packlora
from packlora.adapters.siblings import SiblingGroup
from packlora.ops.lora_linear.plan import ROUTED

Pool = Callable[[int], Ranks]
SECONDS = 300.0


def all_answers(ranks: Pool, cases: Sequence[Case]) -> list[tuple[Case, Answer]]:
    """Of every case on every rank."""
    by_rank = ranks(2).run(answers, cases, seconds=SECONDS)
    found = [(case, own[str(case)]) for own in by_rank for case in cases]
    for case, one in found:
        assert not one.error, f"{case}\n{one.error}"
        assert one.trained, case
    return found


def calls(case: Case) -> int:
    """Of a layer, where all are counted: forwards, recomputations, evaluations."""
    return STEPS * (case.accumulate * (2 if case.checkpointing else 1) + 1)


def assert_served(case: Case, one: Answer) -> None:
    assert one.worst < 1e-10, f"{case}: {one.where} is off by {one.worst:.2g}"
    assert one.accelerated == one.modules == 7 * case.layers, case
    assert (one.served, one.left) == (one.modules * calls(case), {}), case
    assert one.reasons == [], case
    assert one.told == [], case


# --- DDP ---------------------------------------------------------------------------------------------------------------

RECOMPUTE = (("recompute", True), ("keep_outputs", True))
ONE = 2 if SOAK else 1
"""Layers of models whose second layer would be as the first."""
DDP_CASES = [
    Case("ddp"),
    Case("ddp", "inside", accumulate=2, layers=ONE),
    Case("ddp", dora=True, dropout=0.1, checkpointing="plain", layers=ONE),
    Case("ddp", "after", dora=True, options=RECOMPUTE, layers=ONE),
    Case("ddp", dropout=0.1, accumulate=2, checkpointing="reentrant", layers=ONE),
    Case("ddp unused", "after", frozen="layers.0"),
    Case("ddp static", dora=True, frozen="lora_B", layers=ONE),
    Case("ddp views", dora=True, dropout=0.1, accumulate=2, layers=ONE),
]
if SOAK:
    DDP_CASES += [Case("ddp", "after"), Case("ddp static", "after", checkpointing="plain")]


@pytest.mark.slow
def test_under_ddp_everything_is_computed_here_with_the_numbers_of_peft(ranks: Pool) -> None:
    assert said_of("DDP") == "operator"
    for case, one in all_answers(ranks, DDP_CASES):
        assert_served(case, one)
        assert one.groups == 2 * case.layers, "wrapped before or after, siblings are found"


# --- FSDP2 -------------------------------------------------------------------------------------------------------------

FSDP2_CASES = [
    Case("fsdp2"),
    Case("fsdp2", "after", dora=True, dropout=0.1, checkpointing="plain"),
    Case("fsdp2", dropout=0.1, checkpointing="reentrant", layers=ONE),
    Case("fsdp2", "after", dora=True, frozen="layers.0"),
    Case("fsdp2 kept", "after", dora=True, options=RECOMPUTE, layers=ONE),
    Case("fsdp2 root", "after", accumulate=2),
    Case("fsdp2 root", dora=True, frozen="lora_A", layers=ONE),
    Case("fsdp2 parts kept", "after", dora=True, options=RECOMPUTE, layers=ONE),
    Case("fsdp2 parts", dora=True, checkpointing="plain", options=RECOMPUTE, layers=ONE),
    Case("fsdp2 linear", "after", dora=True, dropout=0.1, checkpointing="plain", layers=1),
]
if SOAK:  # every value of every setting is above already
    FSDP2_CASES += [
        Case("fsdp2", "after"),
        Case("fsdp2", dora=True, accumulate=2, options=RECOMPUTE),
        Case("fsdp2 kept", "after"),
        Case("fsdp2 kept", dora=True, dropout=0.1),
        Case("fsdp2 linear", layers=1),
    ]


def test_under_fsdp2_everything_is_computed_here_with_the_numbers_of_peft(ranks: Pool) -> None:
    assert said_of("FSDP2 (") == "operator"
    for case, one in all_answers(ranks, FSDP2_CASES):
        assert_served(case, one)
        assert one.groups == 2 * case.layers, case


def errors(rank: int, case: Case) -> tuple[float, float]:
    """The mean relative error over all tensors against float64, of PEFT and of an accelerated model."""
    exact = life(rank, Case("fsdp2", dora=case.dora), False).tensors
    found = []
    for accelerated in (False, True):
        got = life(rank, case, accelerated).tensors
        assert got.keys() == exact.keys()
        off = [float((got[n].double() - t).norm() / t.norm()) for n, t in exact.items() if float(t.norm()) > 1e-9]
        found.append(sum(off) / len(off))
    return found[0], found[1]


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.soak), True])
def test_in_the_mixed_precision_of_fsdp2_errors_are_within_twice_those_of_peft(dora: bool, ranks: Pool) -> None:
    for wrapper in ("fsdp2 float32", "fsdp2 mixed"):
        for theirs, ours in ranks(2).run(errors, Case(wrapper, dora=dora)):
            assert theirs > 1e-9, "the precision matters"
            assert ours <= 2 * theirs + 1e-6


# --- FSDP1, and wrappers that are not finished --------------------------------------------------------------------------

FSDP1_CASES = [
    Case("fsdp1"),
    Case("fsdp1", "after", dora=True, accumulate=2, options=RECOMPUTE, layers=ONE),
    Case("fsdp1", dora=True, dropout=0.1, checkpointing="plain", layers=ONE),
    Case("fsdp1 grads", "after", dropout=0.1, checkpointing="reentrant"),
    Case("fsdp1 whole", dora=True, frozen="lora_B", layers=ONE),
]
if SOAK:
    FSDP1_CASES += [Case("fsdp1", "after"), Case("fsdp1 whole", "after", accumulate=2)]


def test_under_fsdp1_with_use_orig_params_everything_is_computed_here_with_the_numbers_of_peft(ranks: Pool) -> None:
    """Views of frozen weights want gradients there, which FSDP1 throws away: none are computed."""
    assert said_of("FSDP1 with ") == "operator"
    for case, one in all_answers(ranks, FSDP1_CASES):
        assert_served(case, one)
        assert one.groups == 2 * case.layers, case


def test_a_base_weight_that_is_trained_under_fsdp1_gets_its_gradient_from_peft(ranks: Pool) -> None:
    for case, one in all_answers(ranks, [Case("fsdp1", "after", thawed="q_proj.base_layer", layers=1)]):
        assert one.worst < 1e-10, one.where
        assert one.left == {"its base weight is trained too": calls(case)}
        assert one.served == 6 * calls(case)
        assert one.accelerated == 6


LEFT_CASES = [
    Case("fsdp1 flat", layers=1),
    Case("fsdp1 flat", "after", dora=True, layers=1, options=RECOMPUTE),
    Case("fsdp1 flat", "inside", layers=1),
    Case("fsdp2 leaves", layers=1),
    Case("fsdp2 adapters", "after", dora=True, layers=1),
]


@pytest.mark.soak
def test_where_an_adapter_s_weight_is_a_unit_every_call_is_peft_s_bit_for_bit_and_the_report_says_so(
    ranks: Pool,
) -> None:
    assert said_of("FSDP1 without") == said_of("FSDP2 of `base_layer`") == "PEFT"
    for case, one in all_answers(ranks, LEFT_CASES):
        assert one.worst == 0.0, f"{case}: {one.where}"
        assert one.served == 0, case
        assert sum(one.left.values()) == one.modules * calls(case), case
        assert one.accelerated == (one.modules if case.when == "before" else 0), case
        (reason,) = one.left
        assert "is a unit of FSDP by itself" in reason or case.when == "inside", case
        if case.when == "before":
            (said,) = one.told
            assert reason in said, case
            assert (
                f"but PEFT's own forward has computed {7 * calls(case)} calls of 7 of them since: {reason}" in one.text
            )
        else:
            assert one.reasons == [reason], case
            assert (one.told, one.groups) == ([], 0), case


def halfway(rank: int) -> tuple[float, list[str], int]:
    """accelerate() between the blocks and the root of FSDP2."""
    lives = []
    for accelerated in (False, True):
        model = adapted(Case("none", dora=True))
        for block in blocks(model):
            fully_shard(block)
        report = packlora.accelerate(model, recompute=True) if accelerated else None
        fully_shard(model)
        model(input_ids=data(rank, 0)).logits.square().mean().backward()
        lives.append({clean(name): local(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    assert report is not None
    served = sum(one.served for one in report.served().values())
    return difference(lives[1], lives[0])[0], list(report.notes), served


def test_a_model_that_is_wrapped_halfway_can_still_be_wrapped(ranks: Pool) -> None:
    """A forward of it would make a root of every block."""
    for worst, notes, served in ranks(2).run(halfway):
        assert worst < 1e-10
        assert sum("parts of the model are FSDP units and no unit has them all" in note for note in notes) == 2
        assert served == 14


# --- several adapters --------------------------------------------------------------------------------------------------


def test_adapters_are_switched_under_the_wrappers(ranks: Pool) -> None:
    cases = [
        Case(wrapper, when, dora=dora, adapters=2, layers=1)
        for wrapper, when, dora in (("ddp unused", "before", True), ("fsdp2", "after", True), ("fsdp2 kept", "before", False))
    ]  # fmt: skip
    for case, one in all_answers(ranks, cases):
        assert one.worst < 1e-10, f"{case}: {one.where}"
        assert one.served == one.modules * 2 * 2, "two steps with one adapter, each with an evaluation"
        assert one.left == {"several adapters are active: default, other1": one.modules * 2}, case


# --- compiled ----------------------------------------------------------------------------------------------------------

THREE = (("target_modules", ".*(q_proj|k_proj|down_proj)"),)
COMPILED = [
    Case("ddp", "after", compiled="inside", layers=1, settings=THREE),
    Case("fsdp2", compiled="outside", layers=1, settings=THREE),
]


@pytest.mark.soak
def test_compiled_under_the_wrappers_it_gives_the_numbers_of_peft(ranks: Pool) -> None:
    for case, one in all_answers(ranks, COMPILED):
        assert one.worst < 1e-10, f"{case}: {one.where}"
        assert (one.accelerated, one.groups, one.left) == (3, 1, {}), case


# --- the life of a wrapped model ---------------------------------------------------------------------------------------


def merged(model: Any) -> torch.Tensor:
    model.merge_adapter()
    out = model(input_ids=data(0, 9)).logits
    model.unmerge_adapter()
    return local(out)


def happenings(rank: int, wrapper: str, accelerated: bool, folder: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What a wrapped model gives, step by step, and what of it was not what was expected."""
    case = Case(wrapper, dora=True)
    model = adapted(case)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "other" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    top = WRAPPERS[wrapper](model)
    report = packlora.accelerate(top) if accelerated else None
    optimizer = torch.optim.AdamW([p for p in top.parameters() if p.requires_grad], lr=0.01)
    out: dict[str, torch.Tensor] = {}

    def step(name: str) -> None:
        loss = top(input_ids=data(rank, 3), labels=data(rank, 3)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out[name] = local(loss)

    step("first")
    with torch.no_grad():
        model.set_adapter("other")
        out["other"] = local(top(input_ids=data(rank, 4)).logits)
        model.set_adapter("default")
        with model.disable_adapter():
            out["disabled"] = local(top(input_ids=data(rank, 4)).logits)
        if not wrapper.startswith("fsdp"):
            out["merged"] = merged(model)
            copied = copy.deepcopy(top)
            stream = io.BytesIO()
            torch.save(top, stream)
            stream.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = torch.load(stream, weights_only=False)
            for parameter in copied.parameters():
                parameter.mul_(1.25)
            out["copied"], out["loaded"] = (local(one(input_ids=data(rank, 4)).logits) for one in (copied, loaded))
    step("second")
    whole = get_model_state_dict(top, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        adapters = {name: tensor for name, tensor in whole.items() if "lora_" in name}
        model.save_pretrained(folder, state_dict=adapters if wrapper.startswith("fsdp") else None)
    out |= {f"saved {name}": tensor.clone() for name, tensor in whole.items() if "lora_" in name}
    wrong = []
    if report is not None:
        before = [one.served for one in report.served().values()]
        packlora.restore(top)
        step("restored")
        if [one.served for one in report.served().values()] != before:
            wrong.append("restore() left something")
        again = packlora.accelerate(top)
        if again.accelerated != len(again.modules):
            wrong.append(str(again))
    else:
        step("restored")
    step("last")
    out["reference"] = local(top.eval()(input_ids=data(rank, 4)).logits)
    out |= {f"last {clean(name)}": local(parameter) for name, parameter in top.named_parameters()}
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]) != wrapper.startswith(
        "fsdp"
    ):
        wrong.append("the optimizer has other tensors than the model")
    return out, wrong


def lives(rank: int, wrapper: str, folder: str) -> tuple[tuple[float, str], list[str], float]:
    want, _ = happenings(rank, wrapper, False, f"{folder}/theirs")
    got, wrong = happenings(rank, wrapper, True, f"{folder}/ours")
    dist.barrier()
    base = tiny_model("llama", torch.float64, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = PeftModel.from_pretrained(base, f"{folder}/ours", autocast_adapter_dtype=False).double()
        theirs = tiny_model("llama", torch.float64, **SMALL)
        theirs = PeftModel.from_pretrained(theirs, f"{folder}/theirs", autocast_adapter_dtype=False).double()
    ours = {name: tensor for name, tensor in plain.named_parameters() if "lora_" in name}
    files = max(float((ours[n] - t).abs().max()) for n, t in theirs.named_parameters() if "lora_" in n)
    return difference(got, want), wrong, files


@pytest.mark.parametrize("wrapper", [pytest.param("ddp unused", marks=pytest.mark.soak), "fsdp2"])
def test_what_happens_to_a_wrapped_model_is_what_happens_under_peft(wrapper: str, ranks: Pool, tmp_path: Path) -> None:
    """Adapters switched, disabled and merged, copies, pickles, files, restore() and accelerate() again."""
    for (worst, where), wrong, files in ranks(2).run(lives, wrapper, str(tmp_path)):
        assert worst < 1e-10, where
        assert wrong == []
        assert files < 1e-10


# --- other kinds of layers ---------------------------------------------------------------------------------------------


class Picture(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.linear = nn.Embedding(40, 6), nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.conv(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))
        return y


def pictures(rank: int, kind: str, when: str) -> tuple[float, list[int], list[str | None]]:
    """Under FSDP2, every adapted layer a unit of its own or the model alone, or FSDP1."""
    lives = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["embed", "conv", "linear"], use_dora=True)
        model: Any = get_peft_model(Picture(), config).double()
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        report = None
        if accelerated and when == "before":
            report = packlora.accelerate(model, example={"input_ids": data(0, 0)})
        top = WRAPPERS[kind](model)
        if accelerated and when == "after":
            report = packlora.accelerate(top, example={"input_ids": data(0, 0)})
        optimizer = torch.optim.SGD([p for p in top.parameters() if p.requires_grad], lr=0.1)
        out = {}
        for step in range(2):
            y = top(input_ids=data(rank, step))
            y.square().sum().backward()
            out[f"y {step}"] = local(y)
            optimizer.step()
            optimizer.zero_grad()
        out |= {clean(name): local(p) for name, p in top.named_parameters()}
        lives.append(out)
    assert report is not None
    served = [one.served for one in report.served().values()]
    return difference(lives[1], lives[0])[0], served, [module.reason for module in report.modules]


@pytest.mark.filterwarnings("ignore")
def test_dora_on_embeddings_and_convolutions_under_fsdp(ranks: Pool) -> None:
    for when in ("before", "after"):
        for kind in ("fsdp2 root", "fsdp2 linear"):
            for worst, served, reasons in ranks(2).run(pictures, kind, when):
                assert worst < 1e-10
                assert served == [2, 2, 2]
                assert reasons == [None] * 3, (kind, when)
        for worst, served, _ in ranks(2).run(pictures, "fsdp1 whole", when):
            assert worst < 1e-10
            assert served == [2, 2, 2]


# --- kernels -----------------------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """Two blocks of two layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(32, 32) for name in "ab"}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["a"](x) + block["b"](x).sin()  # type: ignore[index]
        return x


def by_kernels(rank: int) -> float:
    """Beside the same kernels on whole weights, with the same data on both ranks."""
    lives = []
    for each in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(r=5, target_modules=["a", "b"], lora_dropout=0.2)
        model: Any = get_peft_model(Pairs(), config).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        x = torch.randn(5, 32)
        if each:
            sharded(model, lambda model: [layer for block in model.base_model.model.blocks for layer in block.values()])
        report = packlora.accelerate(model, example={"x": x}, plan=ROUTED)
        if not each:  # as where each layer is a unit
            for module in model.modules():
                SiblingGroup.detach(module)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        torch.manual_seed(1)
        found = {}
        for step in range(2):
            y = model(x)
            y.square().mean().backward()
            found[f"y {step}"] = y.detach()
            optimizer.step()
            optimizer.zero_grad()
        assert {one.served for one in report.served().values()} == {2}
        assert {module.plan for module in report.modules} == {ROUTED.name}
        found |= {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}
        lives.append(found)
    return difference(lives[1], lives[0])[0]


@pytest.mark.slow
def test_kernels_read_weights_where_fsdp2_has_put_them(ranks: Pool) -> None:
    pytest.importorskip("triton")
    assert ranks(2).run(by_kernels, seconds=SECONDS) == [0.0, 0.0]
