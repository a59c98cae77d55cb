"""Runs on quantised base models: the numbers of PEFT on the same codes, of dense weights that say the same, of one another."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import PeftModel
from quantised import CONFIGS, codes_of, dequantise, dequantised, load_quantised
from safetensors.torch import load_file, save_file
from test_training import (
    JOBS,
    adapter,
    config,
    distance,
    like_peft,
    perturbed_peft,
    steps,
    train,
    train_by_peft,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from packlora.base.load import read_skeleton
from packlora.base.model import load_base
from packlora.codes.stored import stored_as
from packlora.codes.weight import Quantized, QuantizedLinear
from packlora.commands.plan import make_plan
from packlora.config import Run
from packlora.errors import InputError
from packlora.export.merge import merge_adapter
from packlora.runtime.estimate import memory_parts
from packlora.runtime.prepare import prepare

DOUBLE = {"method": "nf4", "double_quant": True}
Rows = Callable[..., str]
Base = Callable[..., str]


@pytest.mark.parametrize(
    ("of_codes", "quantization", "kind"),
    [
        ("nf4 double", DOUBLE, "dora"),
        pytest.param("fp4", "fp4", "patterns", marks=pytest.mark.soak),
        ("int8", "int8", "bias lora_only"),
    ],
)
def test_losses_and_adapters_are_those_of_peft_on_the_same_codes(
    of_codes: str, quantization: Any, kind: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Real PEFT over bitsandbytes' layers against a run of two jobs that share microbatches; float32. (PEFT's DoRA over 8 bits
    loses its scales on a CPU, and 4 bits are read wrongly there in rows of 96 inputs.)"""
    base = str(tmp_path / "base")
    shutil.copytree(tiny_base("qwen2"), base)
    tiny_model("qwen2", intermediate_size=128).save_pretrained(base)
    model = perturbed_peft(base, kind, tmp_path / "start", load_quantised(base, of_codes))
    job = like_peft(write_rows("rows"), tmp_path / "start")
    other = {**JOBS[1], "adapter": {**JOBS[1]["adapter"], "init_lora_weights": "orthogonal"}}
    tree = config(base, tmp_path / "out", write_rows, [job, other], quantization=quantization)
    prepared = prepare(Run.model_validate(tree))
    losses = train_by_peft(model, prepared.jobs[0].data)
    model.save_pretrained(tmp_path / "peft")
    train(tree)
    for ours, theirs in zip([line for line in steps(tmp_path / "out") if line["job"] == "job"], losses, strict=True):
        assert abs(ours["loss"] - theirs) < 1e-5 * max(1, theirs)
    assert distance(adapter(tmp_path / "out", "job"), load_file(tmp_path / "peft" / "adapter_model.safetensors")) < 1e-5
    ids = torch.arange(3, 40)[None]
    loaded = PeftModel.from_pretrained(load_quantised(base, of_codes), tmp_path / "out" / "job")
    with torch.no_grad():
        torch.testing.assert_close(loaded.train()(ids).logits, model.train()(ids).logits, rtol=2e-4, atol=2e-4)
    # as PEFT begins it fails
    PeftModel.from_pretrained(load_quantised(base, of_codes), tmp_path / "out" / other["name"])


def test_a_run_is_that_on_dense_weights_which_say_the_same(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    """Together, alone, with activations recomputed and after a stop; in float64 to its last digits."""
    base = tiny_base("shallow")
    plain = dequantise(load_quantised(base, "nf4 double"), torch.float32)
    plain.config.quantization_config = None
    del plain.config.quantization_config
    plain.save_pretrained(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(base) / name).exists():
            (tmp_path / "plain" / name).write_bytes((Path(base) / name).read_bytes())
    jobs = [{**job, "train": {**job["train"], "max_steps": 2}} for job in JOBS]
    jobs[0]["data"] = {"path": write_rows("lora", 12, seed=5), "eval_path": write_rows("held", 5, seed=9)}
    dense = config(str(tmp_path / "plain"), tmp_path / "dense", write_rows, jobs, dtype="float64")
    train(dense)
    tree = {**dense, "base_model": base, "output_dir": str(tmp_path / "codes"), "quantization": DOUBLE}
    train(tree, max_steps=1)
    train({**tree, "gradient_checkpointing": True}, resume=True)
    alone = {**tree, "output_dir": str(tmp_path / "alone"), "jobs": tree["jobs"][3:], "max_tokens_per_microbatch": 64}
    train(alone)
    for job in jobs:
        assert distance(adapter(tmp_path / "codes", job["name"]), adapter(tmp_path / "dense", job["name"])) < 1e-10
    assert distance(adapter(tmp_path / "alone", jobs[3]["name"]), adapter(tmp_path / "dense", jobs[3]["name"])) < 1e-10
    evals = [
        [json.loads(line)["eval_loss"] for line in (tmp_path / out / "evals.jsonl").open()]
        for out in ("dense", "codes")
    ]
    for place in (0, -1):
        assert evals[0][place] == pytest.approx(evals[1][place], abs=1e-10)
    with pytest.raises(InputError, match="quantization changed"):
        train({**tree, "quantization": "nf4"}, resume=True)


def test_a_model_that_was_saved_quantised_gives_the_same_bits(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    base = tiny_base("shallow")
    for kind, asked in (("nf4 double", DOUBLE), ("int8", "int8")):
        saved = tmp_path / kind
        load_quantised(base, kind).save_pretrained(saved)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (Path(base) / name).exists():
                (saved / name).write_bytes((Path(base) / name).read_bytes())
        tree = config(base, tmp_path / f"{kind} made", write_rows, JOBS[:1], quantization=asked)
        tree["jobs"][0]["train"]["max_steps"] = 2
        train(tree)
        again = {**tree, "base_model": str(saved), "quantization": None, "output_dir": str(tmp_path / f"{kind} saved")}
        train(again)
        made, read = (adapter(tmp_path / f"{kind} {how}", "lora") for how in ("made", "saved"))
        assert all(torch.equal(made[key], read[key]) for key in made)
        with pytest.raises(
            InputError, match=r"quantization is fp4, but base_model .* is saved as .*; leave the key out"
        ):
            prepare(Run.model_validate({**again, "quantization": "fp4"}))
        with pytest.raises(InputError, match=r"parallel.shard_base does not take quantised layers apart \(base_model"):
            prepare(Run.model_validate({**again, "parallel": {"shard_base": True}}))


@pytest.mark.parametrize(("storage", "dtype"), [("float16", "bfloat16")])
def test_codes_of_four_bits_in_tensors_of_floats_stay_what_they_are(
    storage: str, dtype: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """bnb_4bit_quant_storage, as for FSDP: trained, answered and merged as the same codes in bytes, to the bit."""
    base, dense = tiny_base("shallow"), load_file(Path(tiny_base("shallow")) / "model.safetensors")
    found = {}
    for kind in ("uint8", storage):
        saved, out = tmp_path / kind, tmp_path / f"out {kind}"
        load_quantised(base, "nf4 double", storage=kind).save_pretrained(saved)
        for file in (*Path(base).glob("*token*"), *Path(base).glob("*.jinja")):
            shutil.copy(file, saved)
        tree = config(str(saved), out, write_rows, JOBS[:1], dtype=dtype, sample_prompts=["the quick brown"])
        tree["jobs"][0]["train"]["max_steps"] = 2
        train(tree)
        merge_adapter(out / "lora", tmp_path / f"merged {kind}")
        merged = load_file(tmp_path / f"merged {kind}" / "model.safetensors")
        answers = [json.loads(line)["samples"] for line in (out / "samples.jsonl").open()]
        found[kind] = adapter(out, "lora"), merged, answers
    for got, want in zip(found[storage][:2], found["uint8"][:2], strict=True):
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
    assert found[storage][2] == found["uint8"][2]
    name = "model.layers.0.self_attn.o_proj.weight"
    assert (found[storage][1][name] - dense[name]).norm() < 0.2 * dense[name].norm()


def test_an_output_layer_that_is_the_embedding_is_of_floats_whatever_is_skipped(
    write_rows: Rows, tokenizer: Any, tmp_path: Path
) -> None:
    """A list of layers to skip stands in the place of transformers' own, which has the output layer: it is then announced in
    codes, and saved by nobody, being the embedding."""
    folder, dense = tmp_path / "codes", tmp_path / "dense"
    tiny_model("llama", intermediate_size=128, tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["v_proj"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=asked, device_map={"": "cpu"})
    model.save_pretrained(folder)
    plain = tiny_model("llama", intermediate_size=128, tie_word_embeddings=True)
    codes = {
        path: own for path, own in model.named_modules() if path != "lm_head" and type(own).__name__ == "Linear4bit"
    }
    for path, own in codes.items():
        plain.get_submodule(path).weight.data = dequantised(codes_of(own)).float()
    plain.save_pretrained(dense)
    for out in (folder, dense):
        tokenizer.save_pretrained(out)
        job = {**JOBS[0], "train": {**JOBS[0]["train"], "max_steps": 2}}
        train(config(str(out), tmp_path / f"out {out.name}", write_rows, [job], dtype="float64"))
    assert distance(adapter(tmp_path / "out codes", "lora"), adapter(tmp_path / "out dense", "lora")) < 1e-10


SAYS: dict[str, dict[str, Any] | None] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8": {"quant_method": "fp8"},
    "floats": None,
}


@pytest.mark.parametrize(
    ("says", "holds"),
    [("nf4", "floats"), ("int8", "floats"), ("fp8", "floats"), ("floats", "nf4"), ("floats", "int8"), ("fp4", "nf4"),
     ("nf4", "int8"), ("nf4", "some floats")],
)  # fmt: skip
def test_a_folder_that_says_one_thing_and_holds_another_is_refused_by_plan_and_train_alike(
    says: str, holds: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    base, folder = Path(tiny_base()), tmp_path / "base"
    shutil.copytree(base, folder)
    if holds != "floats":
        load_quantised(str(base), "int8" if holds == "int8" else "nf4").save_pretrained(folder)
    if holds == "some floats":
        tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
        tensors = {key: own for key, own in tensors.items() if not key.startswith(name)}
        save_file(tensors | {name: load_file(base / "model.safetensors")[name]}, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": SAYS[says]}))
    tree = config(str(folder), tmp_path / "runs" / "out", write_rows, JOBS[:1])
    what = r"floats in model\.layers\.1\.mlp\.up_proj" if holds == "some floats" else f"(codes of )?{holds}"
    message = f"base_model .*: config.json says that the weights are {says}, and the files hold {what}"
    with pytest.raises(InputError, match=message):
        make_plan(Run.model_validate(tree))
    with pytest.raises(InputError, match=message):
        train(tree)
    assert not (tmp_path / "runs").exists()
    if says == "nf4" and "floats" in holds:  # as for generate and merge, which plan nothing
        with pytest.raises(
            InputError, match=r"says that model\.\S+ is in codes of bitsandbytes, and the files hold floats"
        ):
            load_base(Run.model_validate(tree), None)


@pytest.mark.parametrize("quantization", [DOUBLE, "int8"], ids=str)
def test_what_a_plan_predicts_is_what_codes_take_and_no_dense_copy_is_kept(
    quantization: Any, write_rows: Rows, tmp_path: Path, tiny_base: Base
) -> None:
    tiny_model("llama", hidden_size=128, intermediate_size=512, vocab_size=320).save_pretrained(tmp_path / "base")
    for file in Path(tiny_base()).glob("*token*"):
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    tree = config(
        str(tmp_path / "base"), tmp_path / "out", write_rows, JOBS[:1], quantization=quantization, dtype="bfloat16"
    )
    run = Run.model_validate(tree)
    prepared = prepare(run)
    base = load_base(run, prepared.tokenizer)
    layers = [module for module in base.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14 and type(base.model.get_output_embeddings()) is torch.nn.Linear
    assert all(isinstance(layer.frozen, Quantized) and layer.frozen.dtype == torch.bfloat16 for layer in layers)
    held = sum(tensor.nbytes for tensor in base.model.state_dict().values())
    predicted = memory_parts(run, prepared, 1)["frozen weights"]
    assert abs(predicted / held - 1) < 0.05
    assert {parameter.dtype for layer in layers for parameter in layer.parameters()} <= {torch.uint8, torch.int8}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("skipped", [["q_proj", "lm_head"], ["model.layers.0"], None])
def test_layers_that_a_saved_configuration_of_bitsandbytes_skips_are_taken_for_dense(
    kind: str, skipped: list[str] | None, tiny_base: Base
) -> None:
    asked = BitsAndBytesConfig(**CONFIGS[kind], llm_int8_skip_modules=skipped)
    model = AutoModelForCausalLM.from_pretrained(tiny_base(), quantization_config=asked, device_map={"": "cpu"})
    wanted = {path for path, module in model.named_modules() if type(module).__module__.startswith("bitsandbytes")}
    stored = stored_as(model.config, "base")
    assert stored is not None and set(stored.layers(read_skeleton(tiny_base(), None))) == wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "int4"}, "quantization: input should be 'nf4'"),
        ({"quantization": {"method": "int8", "double_quant": True}}, "the scales of int8 are not quantised"),
        ({"quantization": {"method": "gptq", "double_quant": True}}, "the scales of gptq are not quantised"),
        ({"quantization": "torchao"}, "so quant_type is needed"),
        ({"quantization": {"method": "nf4", "quant_type": "int8_weight_only"}}, "quant_type is torchao's"),
        ({"quantization": {"method": "torchao", "quant_type": "int2_weight_only"}}, "quant_type"),
        (
            {"quantization": {"method": "torchao", "quant_type": "int8_weight_only", "group_size": 64}},
            "group_size is for torchao's int4_weight_only",
        ),
        (
            {"quantization": {"method": "torchao", "quant_type": "int8_weight_only"}, "parallel": {"shard_base": True}},
            "parallel.shard_base does not take quantised layers apart (quantization); shard_base takes those of",
        ),
        ({"quantization": "nf4", "parallel": {"tensor": 2}}, "parallel.tensor does not take quantised layers apart"),
        (
            {
                "quantization": {"method": "torchao", "quant_type": "int8_weight_only"},
                "parallel": {"pipeline": 2},
            },
            "parallel.pipeline does not take quantised layers apart",
        ),
        (
            {"quantization": "nf4", "parallel": {"pipeline": 2}},
            "parallel.pipeline does not take quantised layers apart",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str, write_rows: Rows) -> None:
    from packlora.run_file import run_from

    with pytest.raises(InputError) as caught:
        run_from(config("base", Path("out"), write_rows, JOBS[:1], **changes))
    assert said in str(caught.value)


def test_what_is_not_installed_or_known_is_refused_before_training(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    tree = config(str(base), tmp_path / "out", write_rows, JOBS[:1])
    find = importlib.util.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
        )
        with pytest.raises(InputError, match=r"quantization: nf4 cannot be met: .*pip install 'packlora\[quant\]'"):
            prepare(Run.model_validate({**tree, "quantization": "nf4"}))
    file = base / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "hqq", "bits": 4}})
    )
    with pytest.raises(InputError, match=r"is quantised by hqq; this version takes floats, and .*dequantize"):
        prepare(Run.model_validate(tree))


def test_an_adapter_of_a_quantised_base_is_merged_into_what_its_codes_stand_for(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    base, ids = tiny_base("qwen2"), torch.arange(3, 40)[None]
    job = {
        "name": "dora",
        "adapter": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "up_proj"]},
        "train": {"max_steps": 2},
    }
    train(config(base, tmp_path / "out", write_rows, [job], quantization=DOUBLE))
    folder = tmp_path / "out" / "dora"
    plain = dequantise(load_quantised(base, "nf4 double"), torch.float32)
    plain_weights = {name: own.clone() for name, own in plain.state_dict().items()}
    with torch.no_grad():
        want = PeftModel.from_pretrained(plain, folder)(ids).logits
        for out, asked in (("auto", {}), ("told", {"quantization": "nf4", "double_quant": True})):
            note = merge_adapter(folder, tmp_path / out, base, **asked)  # type: ignore[arg-type]
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / out, dtype=torch.float32)
            torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-4)
            assert note is not None and "nf4 with double_quant codes of the base stand for" in note and "% off" in note
        for kind, own in (("nf4-double", "nf4 double"), ("int8", "int8")):
            out = tmp_path / f"in {kind}"
            note = merge_adapter(folder, out, base, requantize=kind)
            assert note is not None and "% off its weights (root mean square); the merged model is saved in " in note
            saved, made = AutoModelForCausalLM.from_pretrained(out), load_quantised(str(tmp_path / "auto"), own)
            torch.testing.assert_close(saved.train()(ids).logits, made(ids).logits, rtol=1e-5, atol=1e-5)
            wanted = dequantise(made, torch.float32).state_dict()
            exact = {name: own for name, own in merged.state_dict().items() if name.endswith("_proj.weight")}
            off = sum(float((wanted[name] - own).square().sum()) for name, own in exact.items())
            off = (off / sum(float(own.square().sum()) for own in exact.values())) ** 0.5
            assert f"codes, which are {off:.2%} off its weights" in note
            own_layers = [name for name in exact if "q_proj" in name or "up_proj" in name]
            lost = sum(float((wanted[name] - exact[name]).square().sum()) for name in own_layers)
            added = sum(float((exact[name] - plain_weights[name]).square().sum()) for name in own_layers)
            assert f"in adapted layers {(lost / added) ** 0.5:.1f} times what the adapter adds" in note
        assert merge_adapter(folder, tmp_path / "none", base, quantization="none") is None
        dense = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        want = PeftModel.from_pretrained(dense, folder)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "none", dtype=torch.float32)
        torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match=r"--requantize 'nf5': give none, nf4, nf4-double, .* or float8_weight_only"):
        merge_adapter(folder, tmp_path / "no", base, requantize="nf5")
    with pytest.raises(InputError, match=r"--quantization nf5: .*; give auto, none, nf4, fp4 or int8"):
        merge_adapter(folder, tmp_path / "no", base, quantization="nf5")
    saved = load_quantised(base, "nf4 double")
    saved.save_pretrained(tmp_path / "codes")
    for file in Path(base).glob("*token*"):
        (tmp_path / "codes" / file.name).write_bytes(file.read_bytes())
    note = merge_adapter(folder, tmp_path / "of codes", str(tmp_path / "codes"))
    assert note is not None and "folded into what the base's nf4 with double_quant codes stand for" in note
    one, other = (load_file(tmp_path / out / "model.safetensors") for out in ("auto", "of codes"))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(other[key], tensor, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match=r"--quantization fp4, but base_model .* is saved as nf4 with double_quant"):
        merge_adapter(folder, tmp_path / "no", str(tmp_path / "codes"), quantization="fp4")
    file, where = folder / "adapter_model.safetensors", (base, str(tmp_path / "codes"))
    for told in {"method": "nf4", "dtype": "int8"}, {"method": "nf4", "dtype": 5}, {}:
        save_file(load_file(file), file, {"packlora.quantization": json.dumps(told)})
        for path in where[: 1 if told == {} else 2]:
            with pytest.raises(InputError, match=r"dora says that"):
                merge_adapter(folder, tmp_path / "no", path, quantization="auto" if path == base else "none")
