"""packlora.accelerate beside what PEFT trains otherwise: rows of tokens, which are computed here without a copy of the weight,
and copies of modules, which stay PEFT's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from test_accelerate import IDS, assert_same, outcome
from test_accelerate_experts import Largest
from torch import nn

import packlora

TOKENS = [7, int(IDS[0, 2]), 250, 0, int(IDS[1, 4])]


def adapted(family: str = "llama", tied: bool = False, **settings: Any) -> Any:
    """In train mode, all that is trained away from where it began."""
    base = tiny_model(family, torch.float64, tie_word_embeddings=tied)
    wanted = {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(base, LoraConfig(**wanted), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise)
    return model.train()


CASES: dict[str, dict[str, Any]] = {
    "rows": {"trainable_token_indices": TOKENS},
    "rows, tied": {"trainable_token_indices": TOKENS, "tied": True},
    "rows, scaled": {"trainable_token_indices": TOKENS, "family": "gemma3", "tied": True},
    "rows of both, DoRA": {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [3, 4]}, "use_dora": True},
    "DoRA on the embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "rows under a LoRA of the head": {"trainable_token_indices": TOKENS, "target_modules": ["q_proj", "lm_head"]},
    "copies, one of a sibling": {"modules_to_save": ["lm_head", "embed_tokens", "norm", "k_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_are_peft_s_in_float64(case: str) -> None:
    model = adapted(**CASES[case])
    want, evaluated = outcome(model), outcome(model.eval())
    report = packlora.accelerate(model.train())
    assert_same(outcome(model), want)
    assert_same(outcome(model.eval()), evaluated)
    rows = [module for module in report.modules if module.kind == "trainable_tokens.TrainableTokensLayer"]
    assert {module.plan for module in rows} == ({"rows"} if "trainable_token_indices" in CASES[case] else set())
    assert {(calls.served, *calls.left) for calls in report.served().values()} == {(2,)}
    left = {module.kind for module in report.modules if module.reason}
    assert left == ({"ModulesToSaveWrapper"} if "modules_to_save" in CASES[case] else set())
    packlora.restore(model.train())
    assert_same(outcome(model), want, 0.0)


def test_the_weight_is_not_copied_and_has_no_gradient() -> None:
    """One token goes through a tied model, so nothing else is as large."""
    model = adapted(trainable_token_indices=TOKENS, tied=True)

    def largest() -> int:
        with Largest() as seen:
            model(IDS[:1, 2:4]).logits.square().sum().backward()
        return seen.elements

    weight = model.get_input_embeddings().token_adapter.base_layer.weight.numel()
    assert largest() == weight
    packlora.accelerate(model)
    assert largest() < weight / 4


def test_a_model_lives_as_it_does_in_peft_s_hands(tmp_path: Any) -> None:
    """Adapters are switched, disabled, merged, saved and loaded; and copies are served too."""
    model = adapted(trainable_token_indices=TOKENS, tied=True)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 7]))
    model.double()
    twin = copy.deepcopy(model)
    report = packlora.accelerate(model)

    def same(*models: Any) -> None:
        assert_same(*map(outcome, models), 1e-10)

    for name in ("other", "default"):
        for one in (model, twin):
            one.set_adapter(name)
        same(model, twin)
    with model.disable_adapter(), twin.disable_adapter():
        assert torch.equal(model(IDS).logits, twin(IDS).logits)
    for one in (model, twin):
        one.merge_adapter()
    assert torch.equal(model(IDS).logits, twin(IDS).logits)
    for one in (model, twin):
        one.unmerge_adapter()
    same(model, twin)
    paths = [module.path for module in report.modules if "Tokens" in module.kind]
    assert [(report.served()[path].served, len(report.served()[path].left)) for path in paths] == [(3, 2)] * 2
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(copied, twin)
    model.save_pretrained(tmp_path)
    base = tiny_model("llama", torch.float64, tie_word_embeddings=True)
    loaded = PeftModel.from_pretrained(base, tmp_path, is_trainable=True, autocast_adapter_dtype=False).train()
    packlora.accelerate(loaded)
    same(loaded, twin)


def test_compiled_in_one_graph_and_under_checkpointing_the_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 5, padding_idx=3), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)).double()
    rows = {"0": [3, 8], "2": [1]}
    model = get_peft_model(net, LoraConfig(r=2, target_modules=["1"], trainable_token_indices=rows)).train()
    ids = torch.tensor([[1, 3, 8, 3]])

    def run(call: Any) -> list[torch.Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        y = call(ids)
        return [y, *torch.autograd.grad(y.sin().sum(), trained)]

    want = run(model)
    assert packlora.accelerate(model, example={"input": ids}).accelerated == 3
    for call in (
        model, torch.compile(model, backend="eager", fullgraph=True),
        lambda ids: torch.utils.checkpoint.checkpoint(model, ids, use_reentrant=False),
    ):  # fmt: skip
        assert all(torch.allclose(one, two, rtol=1e-12) for one, two in zip(run(call), want, strict=True))


def test_what_is_not_computed_here_is_peft_s_with_a_reason() -> None:
    model = adapted(trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [3, 4]})
    model.get_input_embeddings().token_adapter.base_layer.scale_grad_by_freq = True
    model.get_output_embeddings().token_adapter.base_layer.register_forward_hook(lambda *_: None)
    want = outcome(model)
    report = packlora.accelerate(model)
    assert_same(outcome(model), want)
    assert [module.reason for module in report.modules if "Tokens" in module.kind] == [
        "its base layer is an embedding with scale_grad_by_freq", "its base layer has hooks or a replaced forward"
    ]  # fmt: skip
