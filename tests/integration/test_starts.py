"""Adapters that begin with what is in the weights of the base (pissa, olora, loftq), against PEFT, which changes the base."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from quantised import load_quantised
from safetensors.torch import load_file
from seeds import some
from test_training import adapter, config, distance, like_peft, steps, train, train_by_peft
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from packlora.adapters.spec import AdapterSpec
from packlora.codes.library import codes_of
from packlora.config import Run
from packlora.config.train import LACKED
from packlora.errors import InputError
from packlora.export.export import export_adapter
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
Base = Callable[..., str]
IDS = torch.arange(3, 40)[None]


def job(name: str, start: str, data: str, **changes: Any) -> dict[str, Any]:
    own = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "init_lora_weights": start, "target_modules": "all-linear"}
    return like_peft(data, Path()) | {"name": name, "adapter": own | changes}


STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pissa": (
        "pissa", {"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    ),
    "olora": ("olora", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", ["pissa", pytest.param("olora", marks=pytest.mark.soak)])
def test_losses_and_the_model_are_those_of_peft_whose_base_is_changed(
    case: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Beside another job that has the base as it is, with weight decay, stopped and resumed."""
    start, changes = STARTS[case]
    base, data = tiny_base("qwen2"), write_rows("rows")
    own = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": start, **changes}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**own))
    jobs = [job("own", start, data, **changes), job("plain", "gaussian", write_rows("more", seed=3))]
    tree = config(base, tmp_path / "out", write_rows, jobs)
    losses = train_by_peft(model, prepare(Run.model_validate(tree)).jobs[0].data)
    train(tree, max_steps=2)
    train(tree, resume=True)
    for ours, theirs in zip([one for one in steps(tmp_path / "out") if one["job"] == "own"], losses, strict=True):
        assert abs(ours["loss"] - theirs) < 2e-5 * max(1, theirs)
    alone = {**tree, "output_dir": str(tmp_path / "alone"), "jobs": jobs[1:]}
    train(alone)
    assert distance(adapter(tmp_path / "out", "plain"), adapter(tmp_path / "alone", "plain")) < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "out" / "own")  # an adapter of the base as it is
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits, rtol=1e-3, atol=1e-3)
    for key, tensor in load_file(tmp_path / "out" / "own" / "adapter_model.safetensors").items():
        if "lora_A" in key:
            first, second = tensor.chunk(2)
            assert not torch.equal(first, second) and first.shape == second.shape


WIDE = {"r": 32, "target_modules": ["q_proj", "down_proj"]}
"""Factors of 2048 and 3072 numbers, which are 4096 and more of both halves."""


@pytest.mark.parametrize(
    ("optim", "changes"),
    some([("adafactor", WIDE), ("adafactor", {}), ("adamw_bnb_8bit", WIDE), ("lion_8bit", WIDE)], one_in=2),
)
def test_an_optimizer_that_looks_at_whole_tensors_sees_those_of_peft(
    optim: str, changes: dict[str, Any], tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Its factors, its clip and the number from which it keeps 8 bits are of the trained half alone; stopped and resumed."""
    if "8bit" in optim:
        pytest.importorskip("bitsandbytes")
    base = tiny_base("qwen2")
    tree = config(base, tmp_path / "out", write_rows, [job("own", "olora", write_rows("rows"), **changes)])
    keys = tree["jobs"][0]["train"]
    for key in LACKED.get(optim, ()):
        del keys[key]
    keys |= {"optim": optim, "learning_rate": 5e-4}
    own = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": "olora"} | changes
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**own))
    losses = train_by_peft(
        model, prepare(Run.model_validate(tree)).jobs[0].data, partial(of_transformers, keys, tmp_path)
    )
    train(tree, max_steps=3)
    train(tree, resume=True)
    for ours, theirs in zip(steps(tmp_path / "out"), losses, strict=True):
        assert abs(ours["loss"] - theirs) < 5e-7 * theirs  # 8 bits of both halves would be off by 2e-6


@pytest.mark.parametrize("whole", [False, True])
def test_a_folder_of_such_a_start_is_continued_as_peft_goes_on_with_it(
    whole: bool, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """On the half that was trained, over a base without the other one; on both where that is asked for. Then once more."""
    base, first, second = tiny_base("qwen2"), tmp_path / "first", tmp_path / "second"
    own = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": "olora"}
    train(config(base, first, write_rows, [job("own", "olora", write_rows("rows"))]), max_steps=3)
    start = first / "own"
    begun = adapter(first, "own")
    more = like_peft(write_rows("more", seed=2), start)
    more["adapter"] |= {"init_lora_weights": True} if whole else {}
    tree = config(base, second, write_rows, [more])
    prepared = prepare(Run.model_validate(tree))
    (note,) = [note for note in prepared.warnings if str(start) in note]
    assert ("trains all of its ranks" if whole else "goes on as olora") in note
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if whole:
        model: Any = PeftModel.from_pretrained(plain, start, is_trainable=True)
    else:
        model = get_peft_model(plain, LoraConfig(**own))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(begun[name.replace(".default", "")].chunk(2, dim=int("lora_B" in name))[0])
    losses = train_by_peft(model, prepared.jobs[0].data)
    train(tree)
    for ours, theirs in zip(steps(second), losses, strict=True):
        assert abs(ours["loss"] - theirs) < 2e-5 * theirs
    ended = adapter(second, "job")
    halves = [
        (begun[key].chunk(2, dim)[1], ended[key].chunk(2, dim)[1]) for key in begun for dim in [int("lora_B" in key)]
    ]
    assert all(torch.equal(before, after) is not whole for before, after in halves)
    tree = config(base, tmp_path / "third", write_rows, [like_peft(more["data"]["path"], second / "job")])
    assert any("goes on as olora" in note for note in prepare(Run.model_validate(tree)).warnings) is not whole


def test_what_a_folder_of_such_a_start_says_of_ranks_goes_by_the_trained_half(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    base, first = tiny_base("qwen2"), tmp_path / "first"
    train(config(base, first, write_rows, [job("own", "olora", write_rows("rows"))]), max_steps=1)
    exported = tmp_path / "exported"
    export_adapter(first / "own", exported, "peft")

    def found(folder: Path, **asked: Any) -> AdapterSpec:
        one = {**job("own", "", str(tmp_path / "rows.jsonl")), "adapter": {"init_from": str(folder), **asked}}
        return prepare(Run.model_validate(config(base, tmp_path / "second", write_rows, [one]))).jobs[0].spec

    for folder in (first / "own", exported):
        for asked in ({}, {"r": 4}, {"init_lora_weights": "olora", "lora_alpha": 6, "r": 4}, {"lora_dropout": 0.0}):
            ranks = {(own.rank, own.trained_rank) for own in found(folder, **asked).modules.values()}
            assert ranks == {(8, 4)}, asked
        assert {own.trained_rank for own in found(folder, init_lora_weights=True, r=8).modules.values()} == {8}
    for asked, said in REFUSED_OF_FOLDERS:
        with pytest.raises(InputError, match=said):
            found(first / "own", **asked)


def test_a_folder_of_such_a_start_is_gone_on_with_after_a_stop_by_the_same_half_alone(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Though run.json holds the defaults of keys that the run file leaves to the folder."""
    base, first = tiny_base("shallow"), tmp_path / "first"
    train(config(base, first, write_rows, [job("own", "olora", write_rows("rows"))]), max_steps=1)

    def second(name: str, **asked: Any) -> dict[str, Any]:
        one = {**job("own", "", str(tmp_path / "rows.jsonl")), "adapter": {"init_from": str(first / "own"), **asked}}
        return config(base, tmp_path / name, write_rows, [one])

    train(second("whole"))
    for name, asked in (("named", {"init_lora_weights": "olora"}), ("left out", {})):
        train(second(name, **asked), max_steps=1)
        if not asked:
            said = r"checkpoint-1 was trained with init_lora_weights olora, and .* now say True"
            with pytest.raises(InputError, match=said):
                train(second(name, init_lora_weights=True), resume=True)
        train(second(name, **asked), resume=True)
        assert distance(adapter(tmp_path / name, "own"), adapter(tmp_path / "whole", "own")) == 0


REFUSED_OF_FOLDERS: list[tuple[dict[str, Any], str]] = [
    ({"r": 8}, "adapter.r is 8, but .* was made with 4"),
    ({"init_lora_weights": "pissa"}, "adapter.init_lora_weights is 'pissa', but .* was made with 'olora'"),
    ({"lora_dropout": 0.1}, "began with olora, and lora_dropout 0.1 would drop the principal part of the base"),
]


def of_transformers(keys: dict[str, Any], folder: Path, groups: list[dict[str, Any]]) -> Any:
    """What transformers' Trainer makes of the keys of a job's `train`."""
    known = {key: value for key, value in keys.items() if key.startswith("adam_") or key in ("optim", "learning_rate")}
    made, settings = Trainer.get_optimizer_cls_and_kwargs(
        TrainingArguments(str(folder), use_cpu=True, report_to=[], **known)
    )
    return made(groups, **settings, weight_decay=keys["weight_decay"])


def test_an_adapter_that_peft_began_by_eva_is_continued_as_by_peft(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Whose ranks and scalings are other ones in each layer."""
    base, data = tiny_base("qwen2"), write_rows("rows")
    names = ["q_proj", "v_proj", "down_proj"]
    config_of_peft = LoraConfig(r=4, target_modules=names, init_lora_weights="eva", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config_of_peft)
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 300, (4, 16), generator=generator)} for _ in range(4)]
    batches = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
    initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    assert len({module.r["default"] for module in model.modules() if hasattr(module, "lora_A")}) > 2
    model.save_pretrained(tmp_path / "eva")
    tree = config(base, tmp_path / "out", write_rows, [like_peft(data, tmp_path / "eva")])
    losses = train_by_peft(model, prepare(Run.model_validate(tree)).jobs[0].data)
    train(tree)
    for ours, theirs in zip(steps(tmp_path / "out"), losses, strict=True):
        assert abs(ours["loss"] - theirs) < 2e-5 * max(1, theirs)


def test_loftq_begins_nearest_to_the_weights_before_they_were_quantised(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """At a learning rate that changes nothing; another job trains on the same codes."""
    base = tmp_path / "base"
    tiny_model("llama", intermediate_size=128).save_pretrained(base)
    for file in Path(tiny_base("shallow")).glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    one = job("own", "loftq", write_rows("rows"), use_dora=True)
    one["train"] = {"max_steps": 1, "learning_rate": 1e-12}
    train(config(str(base), tmp_path / "out", write_rows, [one], quantization="nf4"))
    found = adapter(tmp_path / "out", "own")
    exact, codes = load_file(base / "model.safetensors"), load_quantised(str(base), "nf4")
    for path, module in codes.named_modules():
        if not hasattr(module, "quant_state"):
            continue
        key = f"base_model.model.{path}"
        made, W_NK = codes_of(module).values(torch.float32), exact[f"{path}.weight"]
        product = 1.5 * found[f"{key}.lora_B.weight"] @ found[f"{key}.lora_A.weight"]
        left = torch.linalg.svdvals(W_NK - made)[4:].square().sum().sqrt()  # of the best product of rank 4
        assert abs(float((W_NK - made - product).norm() / left) - 1) < 1e-4
        magnitude = found[f"{key}.lora_magnitude_vector"]
        torch.testing.assert_close(magnitude, (made + product).norm(dim=1), rtol=1e-5, atol=1e-5)
    told = json.loads((tmp_path / "out" / "own" / "adapter_config.json").read_text())
    assert told["init_lora_weights"] is True and told["r"] == 4


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"init_lora_weights": "pissa", "lora_dropout": 0.1}, {}, "would drop the principal part of the base; set lora_dropout: 0"),
    ({"init_lora_weights": "pissa_niter_0"}, {}, r"is 'pissa_niter_0'; give .* pissa_niter_4 \(1 to 99\), olora or loftq"),
    ({"init_lora_weights": "eva"}, {}, r"is 'eva', which .*an adapter made with PEFT's .* can be continued: init_from"),
    ({"init_lora_weights": "pissa", "r": 65}, {}, "takes ranks up to the smaller side of a weight, "),
    ({"init_lora_weights": "olora", "target_modules": ["embed_tokens"]}, {}, "olora is for linear layers, and .*embed_tokens"),
    ({"init_lora_weights": "loftq"}, {}, "is not quantised while it is loaded; set quantization"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "of_run", "said"), REFUSED)
def test_a_start_that_cannot_be_is_refused_before_training(
    changes: dict[str, Any], of_run: dict[str, Any], said: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = config(
        tiny_base("shallow"), tmp_path / "out", write_rows, [job("own", "", write_rows("rows"), **changes)], **of_run
    )
    with pytest.raises((InputError, ValueError), match=said):
        prepare(Run.model_validate(tree))
