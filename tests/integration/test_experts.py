"""Adapters on experts and routers against PEFT, which makes dense deltas, and against each job alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_models import in_float64, tiny_experts
from peft import LoraConfig, get_peft_model

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.files import keyed
from packlora.adapters.linear import Attached
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import AdapterSpec, resolve
from packlora.base.packing import packed_logits, prepare_model
from packlora.ops.dropout.keys import token_keys

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
T = 26


def config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | settings)


def with_adapters(
    family: str, configs: dict[str, LoraConfig], checkpointing: bool = False, **changes: Any
) -> tuple[Any, Attached, list[Adapter], dict[str, AdapterSpec]]:
    """A model that is prepared for packing, with adapters far from their first values."""
    model = tiny_experts(family, **changes)
    specs = {job: resolve(one, model, job) for job, one in configs.items()}
    prepare_model(model, checkpointing)
    attached, adapters = attach(model, specs, {job: len(job) for job in specs})
    with torch.no_grad():
        for adapter in adapters:
            generator = torch.Generator().manual_seed(len(adapter.name))
            for name, parameter in adapter.named_parameters().items():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
                parameter.add_(noise.abs() if name.endswith("magnitude") else noise)
    return model, attached, adapters, specs


def tokens() -> torch.Tensor:
    return torch.randint(3, 300, (T,), generator=torch.Generator().manual_seed(1))


def packed(
    model: Any, attached: Attached, owners: TokenOwners, lengths: tuple[int, ...], ids: torch.Tensor
) -> torch.Tensor:
    """Logits of all tokens, after their backward."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    with attached.active(owners):
        logits = packed_logits(model, ids, positions, lengths, torch.arange(len(ids)))
        (logits.square() * torch.arange(1, len(ids) + 1)[:, None]).sum().backward()
    return logits.detach()


def relative(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None and b is not None
    return float((a.detach() - b).norm() / b.norm().clamp(min=1e-30))


PEFT_CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_parameters": EXPERTS, "use_rslora": True},
    "down alone": {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []},
    "patterns": {
        "target_parameters": [*EXPERTS, "gate.weight"], "rank_pattern": {"experts.down_proj": 5},
        "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 3},
    },
    "old names": {"target_modules": r".*\.(gate_proj|up_proj|o_proj)"},
}  # fmt: skip


@pytest.mark.parametrize("case", PEFT_CASES)
def test_experts_and_routers_give_the_logits_and_gradients_that_peft_gives(case: str) -> None:
    against_peft("qwen3_moe", config(**PEFT_CASES[case]), checkpointing=case == "rslora")


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "olmoe", "granitemoe", "phimoe", "qwen3_next", "gpt_oss"],
)
def test_other_families_go_the_same_way(family: str) -> None:
    router = "router.weight" if family in ("granitemoe", "gpt_oss", "phimoe") else "gate.weight"
    wanted = config(target_parameters=[*EXPERTS, router], target_modules=["o_proj"])
    against_peft(family, wanted, packing=family != "gpt_oss")


def against_peft(family: str, wanted: LoraConfig, checkpointing: bool = False, packing: bool = True) -> None:
    """In float64, with all parameters away from their first values."""
    with in_float64():
        model, attached, (adapter,), specs = with_adapters(family, {"job": wanted}, checkpointing)
        ids = tokens()
        peft = get_peft_model(tiny_experts(family), specs["job"].peft)
        theirs = {name.replace(".default", ""): p for name, p in peft.named_parameters() if p.requires_grad}
        mine = keyed(adapter, adapter.named_parameters())
        assert {name: p.shape for name, p in theirs.items()} == {name: p.shape for name, p in mine.items()}
        with torch.no_grad():
            for name, parameter in theirs.items():
                parameter.copy_(mine[name])
        if packing:
            got = packed(model, attached, TokenOwners(T, ((0, 0, T),)), (T,), ids)
        else:
            model.set_attn_implementation("eager")
            with attached.active(TokenOwners(T, ((0, 0, T),))):
                got = model(input_ids=ids[None]).logits[0]
                (got.square() * torch.arange(1, T + 1)[:, None]).sum().backward()
        want = peft(input_ids=ids[None]).logits[0]
        (want.square() * torch.arange(1, T + 1)[:, None]).sum().backward()
    assert relative(got, want) < 1e-10
    for name, parameter in theirs.items():
        assert relative(mine[name].grad, parameter.grad) < 1e-10, name


THREE = {
    "lora": config(target_modules="all-linear", lora_dropout=0.2),
    "dora job": config(target_parameters=EXPERTS, use_dora=True, r=5, lora_dropout=0.1),
    "another job": config(target_parameters=["experts.down_proj", "gate.weight"], use_rslora=True, r=2),
}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_job_has_the_numbers_beside_others_that_it_has_alone(checkpointing: bool) -> None:
    """LoRA, DoRA and rsLoRA on different parameters, of different ranks, with different dropout, and tokens of nobody."""
    lengths = (7, 10, 6, 3)
    ids, keys = tokens(), torch.from_numpy(token_keys(5, 1, 2, T))
    starts = [sum(lengths[:at]) for at in range(5)]
    with in_float64():
        model, attached, adapters, _ = with_adapters("qwen3_moe", THREE, checkpointing)
        segments = tuple((at, starts[at], starts[at + 1]) for at in range(3))
        together = packed(model, attached, TokenOwners(T, segments, keys), lengths, ids)
        for at, adapter in enumerate(adapters):
            own = slice(starts[at], starts[at + 1])
            alone_model, alone, (same,), _ = with_adapters("qwen3_moe", {adapter.name: THREE[adapter.name]})
            n = lengths[at]
            assert relative(
                _weighted(alone_model, alone, TokenOwners(n, ((0, 0, n),), keys[own]), ids[own], own.start), together[own]
            ) < 1e-10  # fmt: skip
            for name, parameter in adapter.named_parameters().items():
                assert relative(parameter.grad, same.named_parameters()[name].grad) < 1e-10, (adapter.name, name)
        plain, nothing, _, _ = with_adapters("qwen3_moe", {"job": config()})
        positions = torch.arange(3)
        with nothing.active(TokenOwners(3, ())):
            assert relative(packed_logits(plain, ids[-3:], positions, (3,), positions), together[-3:]) < 1e-10


def _weighted(model: Any, attached: Attached, owners: TokenOwners, ids: torch.Tensor, first: int) -> torch.Tensor:
    """As `packed`, of a sample that begins at another place."""
    positions = torch.arange(len(ids))
    with attached.active(owners):
        logits = packed_logits(model, ids, positions, (len(ids),), positions)
        (logits.square() * torch.arange(first + 1, first + len(ids) + 1)[:, None]).sum().backward()
    return logits.detach()
