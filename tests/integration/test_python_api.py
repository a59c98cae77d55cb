"""The Python API: Trainer and Job give what the run file gives, to the bit, and leave a loaded model as it was."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from conftest import WORDS, tiny_model
from peft import LoraConfig, LoraRuntimeConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from seeds import some
from stored_codes import save_stored
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, EarlyStoppingCallback, TrainerCallback

import packlora
from packlora import events
from packlora.api.lora_config import adapter_keys, usual_targets
from packlora.api.rows import read_rows
from packlora.config import AdapterConfig
from packlora.errors import InputError
from packlora.runtime import evaluate
from packlora.runtime.evaluate import HeldOut
from packlora.seeding import stable_hash

Base = Callable[..., str]
TRAIN: dict[str, Any] = {"global_batch_size": 4, "learning_rate": 1e-3}
RUN: dict[str, Any] = {"device": "cpu", "max_tokens_per_microbatch": 96, "seed": 3}


def texts(number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(2, 9))) for _ in range(number)]


COLOURS = [{"prompt": a, "completion": b} for a, b in zip(texts(14, 0), texts(14, 1), strict=True)]
COLUMNS = {"prompt": "question", "completion": "answer"}
QUESTIONS = [{"question": row["prompt"], "answer": row["completion"]} for row in COLOURS]
PAIRS = [
    {"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(texts(9, 2), texts(9, 3), texts(9, 4), strict=True)
]
TALKS = [
    {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}], "source": None}
    for a, b in zip(texts(8, 5), texts(8, 6), strict=True)
]


class ArrowRows:
    """The part of datasets.Dataset by which rows are read, where that library is not installed."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.table, self.column_names = table, table.column_names

    def with_format(self, kind: str) -> ArrowRows:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[pyarrow.Table]:
        for start in range(0, self.table.num_rows, batch_size):
            yield self.table.slice(start, batch_size)


def with_all_names(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as a table has them: each with the columns of all."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def table(rows: list[dict[str, Any]]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(with_all_names(rows))


def dataset(rows: list[dict[str, Any]]) -> Any:
    try:
        from datasets import Dataset
    except ImportError:
        return ArrowRows(table(rows))
    return Dataset.from_list(with_all_names(rows))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def weights(out: Path) -> dict[str, dict[str, bytes]]:
    """The bits of all tensors of each job's adapter; the order of a file's metadata is chance."""
    files = {file.parent.name: load_file(file) for file in out.glob("*/adapter_model.safetensors")}
    return {name: {key: one.numpy().tobytes() for key, one in tensors.items()} for name, tensors in files.items()}


def losses(out: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["job"], line["step"], line["loss"], line["grad_norm"]) for line in lines]


def job(rows: Any = COLOURS, name: str = "colours", **own: Any) -> packlora.Job:
    return packlora.Job(name, data=rows, adapter={"r": 4, "target_modules": ["q_proj"]}, **(TRAIN | own))


# --- the run file's adapters ------------------------------------------------------------------------------------------


def in_a_run_file(base: str, folder: Path) -> Path:
    """The run file of the jobs below, with rows in files; returns its output_dir."""
    lora = {"lora_alpha": 8, "lora_dropout": 0.0}
    tree = {
        "base_model": base, "output_dir": str(folder / "file"), **RUN,
        "jobs": [
            {
                "name": "colours", "adapter": {"r": 16, "use_dora": True, "target_modules": ["q_proj", "v_proj"], **lora},
                "data": {"path": jsonl(folder / "a.jsonl", COLOURS), "eval_path": jsonl(folder / "e.jsonl", COLOURS[:3])},
                "train": {**TRAIN, "num_train_epochs": 2},
            },
            {
                "name": "pairs", "data": {"path": jsonl(folder / "b.jsonl", PAIRS)}, "adapter": {"r": 8},
                "train": {**TRAIN, "trainer": "dpo"},
            },
            {
                "name": "talks", "data": {"path": jsonl(folder / "c.jsonl", TALKS)}, "seed": 7,
                "adapter": {"r": 4, "lora_dropout": 0.1}, "train": TRAIN,
            },
        ],
    }  # fmt: skip
    packlora.train(tree)
    return folder / "file"


def in_python(model: Any, out: Path, form: Callable[[list[dict[str, Any]]], Any], **more: Any) -> packlora.Result:
    """The same jobs by the Python API. form: makes the data of lists."""
    jobs = [
        packlora.Job(
            "colours", data=form(COLOURS), eval_data=form(COLOURS[:3]), adapter=LoraConfig(r=16, use_dora=True),
            num_train_epochs=2, **TRAIN,
        ),
        packlora.Job("pairs", data=form(PAIRS), adapter={"r": 8}, loss_type="dpo", **TRAIN),
        packlora.Job("talks", data=form(TALKS), adapter={"r": 4, "lora_dropout": 0.1}, seed=7, **TRAIN),
    ]  # fmt: skip
    return packlora.Trainer(model, jobs=jobs, output_dir=out, **RUN, **more).train()


@pytest.fixture(scope="module")
def whole(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run of the run file, in `file`."""
    folder = tmp_path_factory.mktemp("api")
    in_a_run_file(tiny_base("shallow"), folder)
    return folder


@pytest.mark.parametrize("form", some([dataset, list, iter], 2), ids=some(["Dataset", "list", "iterator"], 2))
def test_three_jobs_on_objects_give_the_run_files_adapters_to_the_bit(
    form: Callable[..., Any], whole: Path, tiny_base: Base, tmp_path: Path
) -> None:
    result = in_python(tiny_base("shallow"), tmp_path / "out", form)
    assert weights(tmp_path / "out") == weights(whole / "file")
    assert len(weights(whole / "file")) == 3
    assert losses(tmp_path / "out") == losses(whole / "file")
    assert [result[name].status for name in result] == ["done"] * 3
    config = json.loads((tmp_path / "out" / "pairs" / "adapter_config.json").read_text())
    assert config == json.loads((whole / "file" / "pairs" / "adapter_config.json").read_text())


def test_a_loaded_model_is_trained_in_place_to_the_run_files_bits_and_is_as_before(
    whole: Path, tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base("shallow"))
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    seen: list[int] = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    state = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    before, hooks = _anatomy(model), model.model.norm._forward_hooks.copy()
    monkeypatch.delitem(RUN, "device")
    result = in_python(model, tmp_path / "out", list)
    assert weights(tmp_path / "out") == weights(whole / "file")
    assert (
        result["colours"].eval_loss
        == json.loads((whole / "file" / "run.json").read_text())["result"]["jobs"]["colours"]["eval_after"]
    )
    assert _anatomy(model) == before and model.model.norm._forward_hooks == hooks and seen
    handle.remove()
    assert not model.model.norm._forward_hooks, "the handle still knows its hook"
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert (value.data_ptr(), True) == (state[key][0], torch.equal(value, state[key][1])), key


def _anatomy(model: Any) -> list[Any]:
    """What training could leave behind: modules and their attributes, modes, flags and settings."""
    modules = [
        (path, id(one), type(one), one.training, sorted(map(str, vars(one))), "forward" in vars(one))
        for path, one in model.named_modules()
    ]  # fmt: skip
    flags = [(name, id(one), one.requires_grad, one.grad is None) for name, one in model.named_parameters()]
    return [modules, flags, model.config.to_dict(), model.config._attn_implementation]


def test_a_loaded_model_is_as_before_where_training_is_refused_or_breaks_off(tiny_base: Base, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base("shallow"))
    before = _anatomy(model)

    def breaks(event: events.Event) -> None:
        if isinstance(event, events.Stepped):
            raise KeyboardInterrupt

    trainer = packlora.Trainer(model, [job()], output_dir=tmp_path / "out", callbacks=[breaks])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert _anatomy(model) == before
    with pytest.raises(InputError, match="already holds a run"):
        trainer.train()
    assert _anatomy(model) == before


@pytest.mark.parametrize("is_loaded", [False, True])
def test_load_gives_peft_models_side_by_side_that_answer_as_peft_loads_the_folders(
    is_loaded: bool, tiny_base: Base, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_base("shallow"))
    before, ids = _anatomy(base), torch.arange(7, 19)[None]
    plain = base(ids).logits
    jobs = [job(name="a"), job(name="b", learning_rate=1e-2)]
    result = packlora.Trainer(base if is_loaded else tiny_base("shallow"), jobs, output_dir=tmp_path / "out").train()
    models = [result[name].load() for name in "ab"]
    assert all(isinstance(one, PeftModel) and not one.training for one in models)
    for model, name in zip(models, "ab", strict=True):
        fresh = AutoModelForCausalLM.from_pretrained(tiny_base("shallow"))
        wanted = PeftModel.from_pretrained(fresh, tmp_path / "out" / name)(ids).logits
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(wanted, plain, atol=1e-3)
    assert _anatomy(base) == before and torch.equal(base(ids).logits, plain)
    shared = {tensor.data_ptr() for tensor in base.parameters()}
    assert any(tensor.data_ptr() in shared for tensor in models[0].parameters()) is is_loaded


def test_a_loaded_model_without_a_name_takes_a_tokenizer_and_another_ones_name_is_not_written(
    tiny_base: Base, tmp_path: Path
) -> None:
    model, tokenizer = tiny_model("llama"), AutoTokenizer.from_pretrained(tiny_base("shallow"))
    with pytest.raises(InputError, match="tokenizer is missing: the loaded model names no folder or hub id"):
        packlora.Trainer(model, [job()], output_dir=tmp_path / "out")
    told = {**vars(tokenizer)}
    result = packlora.Trainer(model, [job()], output_dir=tmp_path / "out", tokenizer=tokenizer).train()
    assert vars(tokenizer) == told
    assert json.loads((result["colours"].path / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert isinstance(result["colours"].load(), PeftModel)


def test_a_quantised_model_is_trained_in_its_codes_to_the_run_files_bits_and_is_as_before(
    tiny_base: Base, tmp_path: Path
) -> None:
    """As QLoRA users load it, by bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    base = tmp_path / "base"
    tiny_model("qwen2", intermediate_size=128).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_base("shallow")).save_pretrained(base)
    codes = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=codes, dtype=torch.float32, device_map="cpu")
    before, ids = _anatomy(model), torch.arange(7, 19)[None]
    plain = model(ids).logits
    more = {"max_tokens_per_microbatch": 96, "seed": 3}
    named = {"dtype": "float32", "device": "cpu", "quantization": "nf4", **more}
    packlora.Trainer(base, [job()], output_dir=tmp_path / "named", **named).train()
    result = packlora.Trainer(model, [job()], output_dir=tmp_path / "loaded", **more).train()
    assert weights(tmp_path / "loaded") == weights(tmp_path / "named")
    assert _anatomy(model) == before and torch.equal(model(ids).logits, plain) and model.is_loaded_in_4bit
    fresh = AutoModelForCausalLM.from_pretrained(base, quantization_config=codes, dtype=torch.float32, device_map="cpu")
    wanted = PeftModel.from_pretrained(fresh, tmp_path / "named" / "colours")(ids).logits
    for loaded in (result["colours"].load(), packlora.JobResult("done", 4, tmp_path / "named" / "colours").load()):
        torch.testing.assert_close(loaded(ids).logits, wanted, rtol=1e-5, atol=1e-5)


def test_a_model_whose_library_puts_a_forward_of_its_own_onto_layers_of_codes_is_trained(
    tiny_base: Base, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    plain = tmp_path / "plain"
    tiny_model("qwen2", intermediate_size=128).save_pretrained(plain)
    AutoTokenizer.from_pretrained(tiny_base("shallow")).save_pretrained(plain)
    save_stored("int8", plain, tmp_path / "codes")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.float32, device_map="cpu")
    assert "forward" in vars(model.model.layers[0].self_attn.q_proj)
    named = {"dtype": "float32", "device": "cpu", "max_tokens_per_microbatch": 96}
    packlora.Trainer(tmp_path / "codes", [job()], output_dir=tmp_path / "named", **named).train()
    packlora.Trainer(model, [job()], output_dir=tmp_path / "loaded", max_tokens_per_microbatch=96).train()
    assert weights(tmp_path / "loaded") == weights(tmp_path / "named")


def hooked(model: Any, path: str) -> Any:
    model.get_submodule(path).register_forward_hook(lambda module, args, y: y * 1.5)
    return model


def with_forwards_of_accelerate(model: Any, removed: bool) -> Any:
    """A model to whose layers accelerate gave a hook for devices; removed, it leaves them a forward of their own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            add_hook_to_module(module, AlignDevicesHook("cpu"))
            if removed:
                remove_hook_from_module(module)
    return model


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_for_devices_change_no_number(removed: bool, tiny_base: Base, tmp_path: Path) -> None:
    for name in ("plain", "hooked"):
        model = AutoModelForCausalLM.from_pretrained(tiny_base("shallow"))
        model = with_forwards_of_accelerate(model, removed) if name == "hooked" else model
        packlora.Trainer(model, [job()], output_dir=tmp_path / name, max_tokens_per_microbatch=96).train()
    assert weights(tmp_path / "hooked") == weights(tmp_path / "plain")


def scaled(model: Any, path: str) -> Any:
    """A model with another forward on a layer."""
    layer, before = model.get_submodule(path), model.get_submodule(path).forward
    layer.forward = lambda x: 1.5 * before(x)
    return model


def in_codes(model: Any) -> Any:
    """The model in 4-bit codes, with a hook on a layer of bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    codes = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(model.name_or_path, quantization_config=codes, device_map="cpu")
    return hooked(loaded, "model.layers.0.self_attn.q_proj")


def made_in_inference(model: Any) -> Any:
    with torch.inference_mode():
        return copy.deepcopy(model)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])), "PeftModel.*model.unload"),
        (lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])).base_model.model, "has an adapter"),
        (lambda model: model.to("meta"), "has weights on meta"),
        (lambda model: model.model, "model is a LlamaModel, which has no output layer"),
        (lambda model: torch.nn.Linear(2, 2), "model is a Linear, which is no transformers model"),
        (lambda model: hooked(model, "model.layers.0.self_attn.q_proj"), "a hook .* linear layer model.layers.0.self_attn.q"),
        (lambda model: scaled(model, "model.layers.0.mlp.up_proj"), "another forward on its linear layer .*mlp.up_proj"),
        (
            lambda model: with_forwards_of_accelerate(scaled(model, "lm_head"), False),
            "another forward on its linear layer lm_head",
        ),
        (in_codes, "a hook .* linear layer model.layers.0.self_attn.q"),
        (lambda model: hooked(model, "lm_head"), "on its linear layer lm_head, .*remove it"),
        (made_in_inference, "loaded under torch.inference_mode"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_in_place_is_refused_by_name(
    spoil: Callable[[Any], Any], said: str, tiny_base: Base, tmp_path: Path
) -> None:
    model = spoil(AutoModelForCausalLM.from_pretrained(tiny_base("shallow")))
    with pytest.raises(InputError, match=said):
        packlora.Trainer(model, [job()], output_dir=tmp_path / "out").train()


@pytest.mark.parametrize("key", ["dtype", "device", "revision", "quantization", "trust_remote_code"])
def test_keys_that_a_loaded_model_answers_itself_are_refused(key: str, tiny_base: Base, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base("shallow"))
    with pytest.raises(InputError, match=f"{key}: is the loaded model's own"):
        packlora.Trainer(model, [job()], output_dir=tmp_path / "out", **{key: "cpu"})


@pytest.mark.parametrize(("key", "value"), [("tokenizer", "gpt2"), ("output_dir", None), ("output_dir", 5)])
def test_objects_that_are_no_tokenizer_and_no_path_are_refused_by_name(key: str, value: Any, tiny_base: Base) -> None:
    with pytest.raises(InputError, match=f"{key} is {value!r}; give"):
        packlora.Trainer(tiny_base("shallow"), [job()], **{"output_dir": "out", key: value})


# --- rows in memory ---------------------------------------------------------------------------------------------------


def stopping(step: int) -> Callable[[events.Event], events.Stop | None]:
    """A callback that ends the run after a step."""
    return lambda event: events.Stop() if isinstance(event, events.Stepped) and event.step == step else None


def test_a_run_on_rows_in_memory_goes_on_to_the_same_bits_and_refuses_other_rows(
    tiny_base: Base, tmp_path: Path
) -> None:
    def trainer(out: str, rows: Any, **more: Any) -> packlora.Trainer:
        return packlora.Trainer(
            tiny_base("shallow"), [job(rows, eval_data=0.2)], output_dir=tmp_path / out, save_every=1, **RUN, **more
        )

    trainer("whole", COLOURS).train()
    assert trainer("parts", COLOURS, callbacks=[stopping(2)]).train().status == "interrupted"
    with pytest.raises(InputError, match="job 'colours': its data has changed since the run began"):
        trainer("parts", [*COLOURS[:-1], COLOURS[0]]).train(resume=True)
    assert trainer("parts", dataset(COLOURS)).train(resume=True).status == "done"
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    with pytest.raises(InputError, match="its rows were given in Python and are in no file"):
        packlora.train(trainer("parts", COLOURS).run, resume=True)


def test_run_json_says_what_rows_were_and_not_the_rows(tiny_base: Base, tmp_path: Path) -> None:
    rows = [*COLOURS, {"prompt": "a text that is nowhere else", "completion": "the fox"}]
    packlora.Trainer(
        tiny_base("shallow"), [job(rows, eval_data=COLOURS[:2])], output_dir=tmp_path / "out", **RUN
    ).train()
    text = (tmp_path / "out" / "run.json").read_text()
    told = json.loads(text)["jobs"]["colours"]["given"]
    assert {name: (own["kind"], own["rows"], len(own["sha256"])) for name, own in told.items()} == {
        "memory:colours/train": ("list", 15, 64), "memory:colours/eval": ("list", 2, 64),
    }  # fmt: skip
    assert "nowhere else" not in text


def test_equal_rows_have_equal_hashes_whichever_way_they_come_and_others_do_not() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "advantage": 0.5, "note": "x"}, *TALKS[:1]]
    ways = [rows, iter(rows), tuple(rows), dataset(rows), [{**row, "text": None} for row in rows]]
    ways.append(table(rows))
    ways.append([{**rows[0], "input_ids": torch.tensor([5, 6, 7])}, rows[1]])
    digests = {read_rows(way, "a", "data").digest for way in ways}
    assert len(digests) == 1
    others = [
        rows[::-1],
        rows[:1],
        [{**rows[0], "advantage": 0.25}, rows[1]],
        [{**rows[0], "labels": [5, 6, 7]}, rows[1]],
    ]
    assert len({read_rows(way, "a", "data").digest for way in others} - digests) == len(others)


def endless() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = []
    found.append(found)
    return found


class Frame:
    """What a data frame of pandas or Polars shows of itself: columns by name, and Arrow's stream."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._table = table(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.column_names)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


class Broken(Frame):
    """A data frame of which Arrow makes no table, as of a column of several types."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pyarrow.chunked_array([["no columns"]]).__arrow_c_stream__()


def test_a_data_frame_has_the_rows_of_the_same_table() -> None:
    assert read_rows(Frame(COLOURS), "a", "data").digest == read_rows(COLOURS, "a", "data").digest


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], r"data has no rows \(an empty list\)"),
        (iter(()), "data has no rows"),
        ({"train": COLOURS}, "data is one mapping .* give a list of rows, or one split"),
        (3, "data is of type int; it takes a path, a list of mappings"),
        (b"rows", "data is of type bytes"),
        (None, "data is of type NoneType"),
        (Broken([]), "data is a Broken that Arrow cannot read .*; mend it, or give a list of mappings"),
        ([{"prompt": "a", "completion": "b", "input_ids": endless()}], "data has a row that is nested too deep"),
    ],
)
def test_data_that_are_no_rows_are_refused_at_once(data: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"job 'colours': {said}"):
        job(data)


def test_a_row_in_memory_that_is_no_sample_is_refused_with_its_number(tiny_base: Base, tmp_path: Path) -> None:
    trainer = packlora.Trainer(
        tiny_base("shallow"), [job([*COLOURS, {"promt": "a"}])], output_dir=tmp_path / "out", **RUN
    )
    with pytest.raises(InputError, match="job 'colours': the list, row 15: found promt"):
        trainer.train()
    assert not (tmp_path / "out").exists()


def test_streaming_rows_in_memory_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="streaming reads files while it trains, and data is in memory"):
        job(streaming=True)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_share_is_held_out_by_the_seed_and_the_rest_is_trained_on(
    is_file: bool, tiny_base: Base, tmp_path: Path
) -> None:
    """The same as a run with the two parts, also of rows under their own names."""
    drawn = set(np.random.Generator(np.random.Philox(stable_hash("eval_split", 5))).permutation(14)[:4].tolist())
    parts = [[row for at, row in enumerate(COLOURS) if (at in drawn) is is_held] for is_held in (False, True)]
    data = jsonl(tmp_path / "rows.jsonl", QUESTIONS) if is_file else QUESTIONS
    for out, one in (
        ("share", job(data, eval_data=0.25, seed=5, columns=COLUMNS)),
        ("parts", job(parts[0], eval_data=parts[1], seed=5)),
    ):
        result = packlora.Trainer(tiny_base("shallow"), [one], output_dir=tmp_path / out, **RUN).train()
        assert result["colours"].eval_loss is not None
    assert weights(tmp_path / "share") == weights(tmp_path / "parts")


def test_rows_in_other_columns_are_other_rows() -> None:
    """A resumed run refuses them: what is read under a name of one's own counts."""
    others = [QUESTIONS[0] | {"answer": "other"}, *QUESTIONS[1:]]
    found, other = (read_rows(rows, "a", "data", COLUMNS).digest for rows in (QUESTIONS, others))
    assert found == read_rows(table(QUESTIONS), "a", "data", COLUMNS).digest != other


@pytest.mark.parametrize("share", [0.0, 1.0, 7])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(
        InputError, match=f"job 'colours': eval_data is {share}; a share of the rows is between 0 and 1"
    ):
        job(eval_data=share)


# --- keys and adapters ------------------------------------------------------------------------------------------------


def test_unknown_keys_of_a_job_and_of_a_run_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="job 'colours': learning_rat: unknown key; did you mean 'learning_rate'"):
        job(learning_rat=1e-3)
    with pytest.raises(InputError, match=r"job 'colours': r: unknown key; see a job's adapter\.r"):
        job(r=8)
    with pytest.raises(InputError, match=r"job 'colours': epochs: unknown key; see a job's train\.num_train_epochs"):
        job(epochs=3)
    with pytest.raises(InputError, match="save_evry: unknown key; did you mean 'save_every'"):
        packlora.Trainer("base", [job()], output_dir=tmp_path, save_evry=1)
    with pytest.raises(
        InputError, match=r"job 'colours': train\.learning_rate: input should be greater than 0; found '?-1"
    ):
        packlora.Trainer("base", [job(learning_rate=-1.0)], output_dir=tmp_path)
    with pytest.raises(InputError, match=r"jobs are packlora\.Job objects; got dict"):
        packlora.Trainer("base", [{"name": "a"}], output_dir=tmp_path)  # type: ignore[list-item]


TAKEN: dict[str, Any] = {
    "r": 5, "lora_alpha": 7, "lora_dropout": 0.25, "target_modules": ["v_proj", "q_proj"], "use_rslora": True, "use_dora": True,
    "bias": "lora_only", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 9}, "exclude_modules": ["k_proj"],
    "layers_to_transform": [0], "layers_pattern": "layers", "init_lora_weights": "orthogonal", "modules_to_save": ["norm"],
    "trainable_token_indices": [1, 2], "target_parameters": ["mlp.experts.down_proj"],
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "task_type": "SEQ_CLS", "inference_mode": True, "lora_bias": True, "layer_replication": [(0, 1)],
    "megatron_config": {"a": 1}, "use_qalora": True, "alora_invocation_tokens": [1], "ensure_weight_tying": True,
    "runtime_config": LoraRuntimeConfig(ephemeral_gpu_offload=True), "loftq_config": {"loftq_bits": 4}, "use_bdlora": object(),
    "arrow_config": object(), "eva_config": object(), "corda_config": object(), "lora_ga_config": object(),
    "velora_config": object(), "monteclora_config": object(), "kasa_config": object(),
}  # fmt: skip
WITHOUT_EFFECT = {
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "fan_in_fan_out", "megatron_core",
    "qalora_group_size",
}  # fmt: skip


def test_every_field_of_peft_s_configuration_is_taken_over_or_refused_by_name() -> None:
    """A field that a newer PEFT adds is refused where it is set."""
    names = {field.name for field in dataclasses.fields(LoraConfig)}
    assert names - TAKEN.keys() - REFUSED.keys() == WITHOUT_EFFECT
    config = LoraConfig(**{key: value for key, value in TAKEN.items() if key != "use_dora"}, use_dora=True)
    keys = adapter_keys(config, "a")
    assert keys == TAKEN | {"target_modules": ["q_proj", "v_proj"]}
    assert AdapterConfig(**keys).r == 5
    for name, value in REFUSED.items():
        odd = LoraConfig(target_modules=["q_proj"])
        setattr(odd, name, value)
        with pytest.raises(InputError, match=f"job 'a': adapter: LoraConfig has {name}"):
            packlora.Job("a", data=COLOURS, adapter=odd)


@pytest.mark.parametrize("start", ["eva", "corda", "lora_ga"])
def test_a_start_that_is_not_taken_is_refused_by_its_name_and_not_by_what_peft_fills_in_for_it(
    start: Any, tmp_path: Path
) -> None:
    job = packlora.Job("a", data=COLOURS, adapter=LoraConfig(target_modules=["q_proj"], init_lora_weights=start))
    with pytest.raises(
        InputError, match=rf"job 'a': adapter\.init_lora_weights: is '{start}', which takes a pass over"
    ):
        packlora.Trainer("base", [job], output_dir=tmp_path)


def test_targets_that_are_left_to_peft_are_those_that_peft_takes(tiny_base: Base) -> None:
    model = get_peft_model(tiny_model("qwen3"), LoraConfig())
    keys = adapter_keys(LoraConfig(), "a")
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert set(usual_targets("a", "qwen3")) == adapted and "target_modules" not in keys
    assert (keys["r"], keys["lora_alpha"], keys["lora_dropout"]) == (8, 8, 0.0)
    with pytest.raises(InputError, match="has no target_modules, and PEFT knows none for a odd model"):
        usual_targets("a", "odd")
    with pytest.raises(InputError, match="adapter is a int, which is none"):
        packlora.Job("a", data=COLOURS, adapter=3)  # type: ignore[arg-type]


LOSS = """
def loss(logp, rows):
    return -rows.column("gain") * logp
"""


def test_a_function_gives_what_the_same_function_in_a_file_gives_and_another_one_is_refused(
    tiny_base: Base, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOSS)

    def loss(logp: torch.Tensor, rows: Any) -> torch.Tensor:
        return -rows.column("gain") * logp

    def other(logp: torch.Tensor, rows: Any) -> torch.Tensor:
        return -2 * rows.column("gain") * logp

    rows = [{**row, "gain": 0.1 * n} for n, row in enumerate(COLOURS)]

    def trainer(objective: Any, out: str, form: Callable[..., Any] = list) -> packlora.Trainer:
        jobs = [job(form(rows), objective=objective)]
        return packlora.Trainer(tiny_base("shallow"), jobs, output_dir=tmp_path / out, save_every=1, **RUN)

    trainer(f"{tmp_path / 'mine.py'}:loss", "file").train()
    trainer(loss, "function", dataset).train()
    assert weights(tmp_path / "file") == weights(tmp_path / "function")
    assert json.loads((tmp_path / "function" / "run.json").read_text())["config"]["jobs"][0]["train"]["objective"] == (
        "memory:colours"
    )
    with pytest.raises(InputError, match=r"train\.objective memory:colours is not the one that the run began with"):
        trainer(other, "function").train(resume=True)


# --- callbacks of transformers ----------------------------------------------------------------------------------------


class Heard(TrainerCallback):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def _note(self, method: str, state: Any, *more: Any) -> None:
        self.calls.append((state.trial_name, method, state.global_step, *more))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("begin", state, state.max_steps, args.learning_rate, Path(args.output_dir).name)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("step", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._note("log", state, logs)
        assert state.log_history[-1] == {**logs, "step": state.global_step}

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._note("evaluate", state, metrics["eval_loss"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("save", state)
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("end", state)

    def of(self, name: str, method: str) -> list[tuple[Any, ...]]:
        return [call[2:] for call in self.calls if call[:2] == (name, method)]


def test_a_callback_of_transformers_hears_of_every_job_what_the_logs_say(tiny_base: Base, tmp_path: Path) -> None:
    heard = Heard()
    jobs = [job(name="a", eval_data=COLOURS[:3]), job(name="b", num_train_epochs=2, learning_rate=2e-3)]
    trainer = packlora.Trainer(
        tiny_base("shallow"), jobs, output_dir=tmp_path / "out", callbacks=[heard], save_every=2, eval_every=2, **RUN
    )
    trainer.train()
    assert heard.of("a", "begin") == [(0, 4, 1e-3, "a")] and heard.of("b", "begin") == [(0, 8, 2e-3, "b")]
    assert heard.of("a", "step") == [(n,) for n in range(1, 5)] and len(heard.of("b", "step")) == 8
    history = json.loads((tmp_path / "out" / "a" / "trainer_state.json").read_text())["log_history"]
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    told = [tuple(logs[key] for key in keys) for _, logs in heard.of("a", "log") if "loss" in logs]
    assert told == [tuple(line[key] for key in keys) for line in history if "loss" in line]
    wanted = [(line["step"], line["eval_loss"]) for line in history if "eval_loss" in line]
    assert heard.of("a", "evaluate") == wanted and [step for step, _ in wanted] == [0, 2, 4]
    assert not heard.of("b", "evaluate")
    assert heard.of("a", "save") == [(2,), (4,)] and heard.of("a", "end") == [(4,)] and heard.of("b", "end") == [(8,)]
    assert heard.calls[-1][1] == "end"


def patience_by_hand(found: list[float], patience: int) -> int:
    """Evaluations until there were so many in a row that were no better than the best before, counted from 1."""
    best, bad = found[0], 0
    for number, loss in enumerate(found[1:], 2):
        bad = 0 if loss < best else bad + 1
        best = min(best, loss)
        if bad >= patience:
            return number
    return len(found)


def test_early_stopping_of_transformers_ends_each_job_where_its_own_losses_say_also_after_a_resume(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are given by step: those of one job get worse after its third, those of the other never."""
    losses = {"a": [5.0, 4.0, 3.5, 3.8, 3.0, 2.5, 2.0, 1.5, 1.0], "b": [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]}
    monkeypatch.setattr(evaluate, "_held_out", lambda job, *_: HeldOut(losses[job.name][job.step], {}))

    def trainer(out: str, *callbacks: Any) -> packlora.Trainer:
        own = {"eval_data": COLOURS[:1], "adapter": {"r": 4}, "global_batch_size": 1, "num_train_epochs": 4}
        made = [packlora.Job(name, data=COLOURS[:2], **own) for name in losses]
        return packlora.Trainer(
            tiny_base("shallow"),
            made,
            output_dir=tmp_path / out,
            callbacks=callbacks,
            eval_every=1,
            save_every=0,
            **RUN,
        )

    ends = {name: patience_by_hand(found, 1) - 1 for name, found in losses.items()}
    assert 2 <= ends["a"] < ends["b"] == 8
    result = trainer("early", EarlyStoppingCallback(early_stopping_patience=1)).train()
    assert {name: result[name].step for name in losses} == ends
    trainer("parts", EarlyStoppingCallback(early_stopping_patience=1), stopping(ends["a"] - 1)).train()
    again = trainer("parts", EarlyStoppingCallback(early_stopping_patience=1)).train(resume=True)
    assert {name: again[name].step for name in losses} == ends
    assert weights(tmp_path / "parts") == weights(tmp_path / "early")


# --- a notebook -------------------------------------------------------------------------------------------------------


class Output:
    """What IPython's display(..., display_id=True) returns."""

    def __init__(self, first: Any) -> None:
        self.shown = [first]

    def update(self, html: Any) -> None:
        self.shown.append(html)


def test_a_notebook_has_one_output_that_changes_and_prints_no_line_a_step(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs: list[Output] = []

    def display(html: Any, display_id: bool = False) -> Output:
        assert display_id
        outputs.append(Output(html))
        return outputs[-1]

    shell, ipython, shown = (
        types.SimpleNamespace(kernel=object()),
        types.ModuleType("IPython"),
        types.ModuleType("IPython.display"),
    )
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    shown.display, shown.HTML = display, str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr("packlora.report.notebook.PAUSE", 0.0)
    jobs = [job(name="a", eval_data=0.2), job(name="b")]
    result = packlora.Trainer(tiny_base("shallow"), jobs, output_dir=tmp_path / "out", **RUN).train()
    (output,) = outputs
    assert len(output.shown) > 8 and capsys.readouterr().out == ""
    last = output.shown[-1]
    assert last.count("<polyline") == 2 and "<circle" in last and last.count("done") == 2 and "4/4" in last
    assert f"{result['a'].eval_loss:.4f}" in last
    assert "<td>a</td><td>done</td><td>3</td>" in result._repr_html_()
    assert "<td>b</td>" in result["b"]._repr_html_()


# --- results, answers, merged models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answered(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory) -> packlora.Result:
    folder = tmp_path_factory.mktemp("answers")
    return packlora.Trainer(tiny_base("shallow"), [job(learning_rate=1e-2)], output_dir=folder / "out", **RUN).train()


def test_generate_gives_peft_s_own_answers_to_the_chat_template(answered: packlora.Result, tiny_base: Base) -> None:
    model, tokenizer = answered["colours"].load(), AutoTokenizer.from_pretrained(tiny_base("shallow"))
    wanted = []
    for prompt in ("the quick", "some more of"):
        said = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        out = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        wanted.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    folder = str(answered["colours"].path)
    assert packlora.generate(folder, ["the quick", "some more of"], max_new_tokens=6) == wanted
    assert (
        packlora.generate(answered["colours"], [[{"role": "user", "content": "the quick"}]], max_new_tokens=6)
        == wanted[:1]
    )
    with pytest.raises(InputError, match="generate: max_tokens: unknown key; did you mean 'max_new_tokens'"):
        packlora.generate(folder, ["a"], max_tokens=3)


def test_merge_gives_the_logits_of_peft_s_merged_model(answered: packlora.Result, tmp_path: Path) -> None:
    ids = torch.arange(7, 19)[None]
    wanted = answered["colours"].load().merge_and_unload()(ids).logits
    out = packlora.merge(answered["colours"], tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="merge: dtyp: unknown key; did you mean 'dtype'"):
        packlora.merge(answered["colours"], tmp_path / "other", dtyp="float32")


def test_the_page_on_python_does_what_it_says(tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks of code, one after the other, on a tiny model."""
    page = (Path(packlora.__file__).parents[1] / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("Qwen/Qwen3-0.6B", tiny_base("qwen3")), names)
    assert {file.parents[1].name for file in tmp_path.glob("runs/*/*/adapter_config.json")} == {
        "mine",
        "loaded",
        "early",
    }
    assert names["model"].peft_config["default"].base_model_name_or_path == tiny_base("qwen3")
    assert (tmp_path / "runs" / "merged" / "model.safetensors").exists()


def test_a_result_names_its_jobs(answered: packlora.Result) -> None:
    assert list(answered) == ["colours"] and answered["colours"] is answered.jobs["colours"]
    assert answered["colours"].path == answered.output_dir / "colours"
    with pytest.raises(KeyError, match="there is no job 'pairs'; there are colours"):
        answered["pairs"]


def test_events_are_public_by_their_name_and_by_the_older_one() -> None:
    import packlora.callbacks

    assert packlora.events.Stepped is packlora.callbacks.Stepped is events.Stepped
    assert packlora.events.ThroughputCallback is packlora.callbacks.ThroughputCallback
    assert all(hasattr(packlora.events, name) for name in packlora.events.__all__)
    assert "Plan" not in packlora.__all__ and inspect.isclass(packlora.Plan)


def test_the_older_runs_of_run_files_say_nothing_of_given_rows(whole: Path) -> None:
    record = json.loads((whole / "file" / "run.json").read_text())
    assert all("given" not in own for own in record["jobs"].values())
