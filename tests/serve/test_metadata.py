"""Keys of user_metadata.packlora have the effects of PEFT's configuration, and train_unembed trains the output layer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from serving import NAME, Talk, datum, host_of, leave
from transformers import AutoModelForCausalLM

from packlora.ops.cross_entropy import chunked
from packlora.serve.errors import Refused
from packlora.serve.service import Service

RANK = 4
CASES: list[dict[str, Any]] = [
    {},
    {"lora_alpha": 3},
    {"lora_dropout": 0.4},
    {"use_dora": True},
    {"use_rslora": True},
    {"target_modules": ["q_proj", "down_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": r".*layers\.1\..*(up|gate)_proj"},
    {"rank_pattern": {"q_proj": 7, "layers.0.mlp.up_proj": 2}},
    {"alpha_pattern": {"v_proj": 2, "down_proj": 64}},
    {"rank_pattern": {"k_proj": 9}, "alpha_pattern": {"k_proj": 5}, "use_rslora": True, "use_dora": True},
    {"init_lora_weights": False},
    {"init_lora_weights": "gaussian"},
]


@pytest.fixture(scope="module")
def talk(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    state = tmp_path_factory.mktemp("serve")
    found = Talk(Service({NAME: host_of(tiny_base("llama"), state, budget=512)}, state))
    yield found
    leave(found.service)


@pytest.fixture(scope="module")
def base(tiny_base: Callable[[str], str]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_base("llama"))


def logprobs_of(model: Any, row: Any) -> np.ndarray:
    with torch.no_grad():
        logp = model.eval()(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    return np.asarray(logp.gather(1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0])


def spreads(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Standard deviation of all values of A, and of B."""
    return {
        part: float(torch.cat([own.flatten() for name, own in tensors.items() if part in name]).std(correction=0))
        for part in ("lora_A", "lora_B")
    }


def test_loftq_of_a_base_that_is_not_quantised_is_refused(talk: Talk) -> None:
    with pytest.raises(Refused, match=r"init_lora_weights: loftq makes up for what quantization loses, and .* is not"):
        talk.model(talk.session("loftq"), init_lora_weights="loftq")


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_key_has_the_effect_of_pefts(talk: Talk, base: Any, case: int) -> None:
    how, row = CASES[case], datum(case, 40)
    model = talk.model(talk.session(f"case {case}"), **how)
    first = talk.folder(model, "start")
    config = json.loads((first / "adapter_config.json").read_text())
    named = {name: value for name, value in how.items() if name not in ("target_modules", "init_lora_weights")}
    for name, value in named.items():
        assert config[name] == value, name
    targets = how.get("target_modules", config["target_modules"])
    settings = {"lora_alpha": 32, **named, "init_lora_weights": how.get("init_lora_weights", True)}
    torch.manual_seed(case)
    theirs = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM", **settings)
    )
    expected, tensors = get_peft_model_state_dict(theirs), load_file(first / "adapter_model.safetensors")
    shapes = {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): own.shape
        for name, own in expected.items()
    }
    found = {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): own.shape
        for name, own in tensors.items()
    }
    assert found == shapes
    for part, spread in spreads(tensors).items():
        assert spread == pytest.approx(spreads(expected)[part], rel=0.1), part

    talk.forward_backward(model, [row])
    talk.step(model, 3e-2)
    plain, noisy = talk.forward_backward(model, [row], only=True), talk.forward_backward(model, [row])
    talk.run()
    trained = PeftModel.from_pretrained(copy.deepcopy(base), str(talk.folder(model, "end")))
    own = talk.result(plain)[1]
    np.testing.assert_allclose(own, logprobs_of(trained, row), rtol=1e-4, atol=1e-4)
    assert np.abs(own - logprobs_of(base, row)).mean() > 1e-2, "it has learnt something"
    drops = bool(how.get("lora_dropout"))
    assert (np.abs(own - talk.result(noisy)[1]).mean() > 1e-3) == drops


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "gspo"])
def test_train_unembed_trains_the_output_layer_without_all_logits(
    talk: Talk, base: Any, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of A and B there are autograd's of PEFT's model, and logits are made in pieces of rows."""
    calls = []
    original = chunked.chunked_cross_entropy
    monkeypatch.setattr(
        chunked, "chunked_cross_entropy", lambda *own, **more: calls.append(loss) or original(*own, **more)
    )
    session, row = talk.session(f"unembed {loss}"), datum(3, 30)
    body = {
        "session_id": session, "model_seq_id": 0, "base_model": NAME,
        "user_metadata": {"packlora": '{"init_lora_weights": false}'},
        "lora_config": {"rank": RANK, "seed": 2, "train_unembed": True, "train_attn": False, "train_mlp": False},
    }  # fmt: skip
    model = str(talk.result(talk.desk.create_model(talk.owner, body))["model_id"])
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), str(talk.folder(model, "start")), is_trainable=True)
    names = [name for name, own in theirs.named_parameters() if own.requires_grad]
    assert len(names) == 2 and all("lm_head" in name for name in names)
    logits = theirs(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]
    logp = logits.log_softmax(-1).gather(1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]
    gains = torch.linspace(-1, 1, 30)
    inputs: dict[str, Any] = {"weights": gains.numpy()}
    if loss != "cross_entropy":
        inputs = {"logprobs": logp.detach().numpy(), "advantages": gains.numpy()}
    more = {"sequence_ratio_mask": np.ones(30, np.float32)} if loss == "gspo" else {}
    (-(gains * logp).sum()).backward()  # all three have this gradient where the ratio is 1
    norm = torch.cat([own.grad.flatten() for own in theirs.parameters() if own.grad is not None]).norm().item()
    talk.forward_backward(model, [datum(3, 30, **inputs, **more)], loss)
    step = talk.step(model, 1e-2)
    talk.run()
    assert talk.result(step)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert calls
    folder: Path = talk.folder(model)
    assert any("lm_head" in name for name in load_file(folder / "adapter_model.safetensors"))
