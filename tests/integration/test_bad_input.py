"""Bad input through the real command line: exit code 2, a message that says where, no traceback, nothing lost, no run.json."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from peft import LoraConfig
from safetensors.torch import save_file
from typer.testing import CliRunner
from waiting import SECONDS

import packlora
from packlora.cli import app
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
Base = Callable[..., str]


@pytest.fixture
def make(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """(changes of the job "first", changes of the top level) -> a run file's tree that trains unless a change is bad."""

    def make(job: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
        good = {"name": "good", "data": {"path": write_rows("good", 4)}, "train": {"max_steps": 1}}
        first = {"name": "first", "data": {"path": write_rows("rows", 4)}, "train": {"max_steps": 1}} | (job or {})
        return {"base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"), "jobs": [good, first]} | top

    return make


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[..., str]:
    """Train a tree with the command, which must refuse it; returns what it says."""

    def refusal(tree: dict[str, Any], *options: str) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(tree))
        before = snapshot(Path(tree["output_dir"]))
        result = CliRunner().invoke(app, ["train", str(file), *options])
        assert result.exit_code == 2, (result.output, result.exception)
        assert isinstance(result.exception, SystemExit)  # and no traceback
        assert result.stdout == ""
        assert result.stderr.startswith("packlora: ")
        assert snapshot(Path(tree["output_dir"])) == before
        return result.stderr.removeprefix("packlora: ").rstrip()

    return refusal


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """All that lies below a folder, with the content of files."""
    paths = folder.rglob("*") if folder.is_dir() else []
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "packlora", *arguments], capture_output=True, text=True, timeout=SECONDS
    )


def test_the_run_that_the_refused_ones_are_made_from_trains(make: Any, tmp_path: Path) -> None:
    result = packlora.train(packlora.Run.model_validate(make()))
    assert result.status == "done"
    assert (tmp_path / "out" / "run.json").exists()


# --- the command line --------------------------------------------------------------------------------------------------


def test_a_malformed_data_line_ends_with_2_and_names_job_file_and_line(make: Any, refusal: Any, tmp_path: Path) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": }\n')
    assert refusal(make({"data": {"path": str(data)}})).splitlines()[-1] == (
        f"job 'first': {data}, line 2: not valid JSON: Expecting value (column 31)"
    )


def test_a_base_model_that_is_not_there_ends_with_2_without_waiting_for_the_network(
    make: Any, refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "no-such-model"
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asks the network"))
    said = refusal(make(base_model=str(missing)))
    assert f"base_model '{missing}'" in said
    assert "there is no such folder" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_help_and_version_import_few_modules_and_no_torch() -> None:
    """So they answer in a quarter of a second of processor time."""
    script = (
        "import sys\nfrom packlora.cli import app\ntry: app(sys.argv[1:])\nexcept SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "print(code, sorted(heavy), len(sys.modules))"
    )
    for option, wanted, most in (("--help", "train", 420), ("--version", packlora.__version__, 240)):
        words = [sys.executable, "-c", script, option]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        assert wanted in done.stdout
        code, *heavy, modules = done.stdout.splitlines()[-1].split()
        assert (code, heavy) == ("0", ["[]"]) and int(modules) < most, done.stdout


def test_python_m_packlora_is_the_command() -> None:
    result = command("--version")
    assert (result.returncode, result.stdout.strip()) == (0, packlora.__version__)


@pytest.mark.parametrize(
    ("problems", "code", "said"), [([], 0, "packlora can train on"), (["x is missing"], 1, "x is missing")]
)
def test_doctor_exits_with_1_exactly_when_something_is_missing(
    problems: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packlora.commands.doctor._problems", lambda: problems)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert said in result.stdout
    assert torch.__version__.partition("+")[0] in result.stdout


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "run.yaml", "--max-steps", "0"], ["trian", "run.yaml"], ["train", "--x"]]
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


def test_an_error_that_click_takes_for_ctrl_d_is_no_mere_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packlora.commands.schema.run_file_schema", mock.Mock(side_effect=EOFError("cut short")))
    result = CliRunner().invoke(app, ["schema"])
    assert "cut short" in str(result.exception), result.output


# --- run file ----------------------------------------------------------------------------------------------------------


def test_a_bad_override_and_a_missing_run_file_are_refused(make: Any, refusal: Any, tmp_path: Path) -> None:
    assert "job 'first': train.learning_rate: " in refusal(make(), "--set", "jobs.first.train.learning_rate=0")
    result = CliRunner().invoke(app, ["train", str(tmp_path / "missing.yaml")])
    assert result.exit_code == 2
    assert f"cannot read the run file {tmp_path}/missing.yaml" in result.stderr


def test_one_of_several_processes_that_does_not_know_the_others_is_refused(
    make: Any, refusal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "'RANK' is not set" in refusal(make())


# --- model, device, target modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "said"),
    [("gpu", "'gpu' is not a device"), ("", "'' is not a device"), ("meta", "'meta' is not supported"),
     ("cuda:9", "'cuda:9' is not there; this machine has "),
     pytest.param("cuda", "'cuda' is not there; this machine has 0 usable GPUs",
                  marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"))],
)  # fmt: skip
def test_a_device_that_is_not_there_is_refused(make: Any, refusal: Any, device: str, said: str) -> None:
    assert f"device: {said}" in refusal(make(device=device))


def test_a_base_model_that_cannot_be_read_is_refused_with_what_is_wrong(
    make: Any, refusal: Any, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"base_model '{empty}' (folder): cannot load the configuration: " in refusal(make(base_model=str(empty)))
    assert "base_model './no/folder': there is no such folder (seen from " in refusal(make(base_model="./no/folder"))
    message = refusal(make(base_model="owner/no-such-model"))
    assert "base_model 'owner/no-such-model' (hub id, or folder that does not exist): cannot load" in message


def test_what_ends_before_the_first_step_leaves_no_folder_whatever_it_is(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an error of this package, which has a traceback."""

    def fails(*_: Any) -> None:
        raise KeyError("not foreseen")

    monkeypatch.setattr("packlora.runtime.placement.load_base", fails)
    with pytest.raises(KeyError):
        packlora.train(make() | {"output_dir": str(tmp_path / "runs" / "first")})
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(make: Any, refusal: Any, tmp_path: Path) -> None:
    tree = make()
    shutil.copytree(tree["base_model"], tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    message = refusal(tree | {"base_model": str(tmp_path / "small")})
    assert "job 'good': its data has token " in message
    assert "the model has embeddings for 50 and the tokenizer 309 tokens: its vocabulary was grown" in message


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"target_modules": ["qkv_proj_x"]}, "target_modules ['qkv_proj_x'] matches nothing in the model; linear layers are "
         "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, and all-linear, not in a list, takes them all"),
        ({"target_modules": "attn.*"}, "target_modules 'attn.*' matches nothing in the model"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [7]},
         "layers_to_transform has 7, and the model has no layer of that number"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 7]},
         "layers_to_transform has 7, and the model has no layer of that number; layers count from 0"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2, 0], "layers_pattern": "layers"},
         "layers_to_transform has 2, and the model has no layer of that number in lists named 'layers' (layers_pattern)"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
         "layers_to_transform has 1, and the model has no layer of that number in lists named 'h'"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
         "exclude_modules ['q_proj'] leaves nothing of what target_modules ['q_proj'] matches"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]},
         "modules_to_save ['q_proj'] leaves nothing of what target_modules ['q_proj'] matches"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "exclude_modules": r".*layers\.1\..*"},
         r"layers_to_transform [1] with exclude_modules '.*layers\\.1\\..*' leaves nothing"),
        ({"target_modules": ["q_proj", "v_prj"]}, "target_modules names 'v_prj', which matches nothing in the model; "
         "did you mean 'v_proj'?"),
        ({"target_modules": ["q_proj", "norm"]}, "target_modules matches model.norm, of type LlamaRMSNorm; linear layers, emb"),
        ({"modules_to_save": ["self_attn"]}, "modules_to_save matches model.layers.0.self_attn, a module of type LlamaAtt"),
        ({"modules_to_save": ["score"]}, "modules_to_save names 'score', which matches nothing in the model"),
        ({"trainable_token_indices": [3, 320]}, "trainable_token_indices has 320, and model.embed_tokens has rows for tok"),
        ({"trainable_token_indices": {"v_emb": [3]}}, "trainable_token_indices names 'v_emb', which matches nothing in the"),
        ({"trainable_token_indices": {"norm": [3]}}, "trainable_token_indices matches model.layers.0.input_layernorm, of type"),
        ({"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]}, "model.embed_tokens is in modules_to_save and"),
        ({"trainable_token_indices": [3], "target_modules": ["embed_tokens"]}, "model.embed_tokens is to be trained in two"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "init_lora_weights: orthogonal takes even ranks, and model.layers.0"),
        ({"exclude_modules": ".*proj"}, "target_modules all-linear matches nothing: the model has no linear layers but those"),
        ({"target_modules": ".*self_attn"}, "target_modules matches model.layers.0.self_attn, of type LlamaAttention"),
        ({"rank_pattern": {"c_attn": 4}}, "adapter.rank_pattern has 'c_attn', which matches no adapted module"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 4}}, "adapter.alpha_pattern has 'v_proj', which matches"),
        ({"bias": "all"}, "bias: all, but the model has no biases; use bias: none"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_the_model_is_refused(make: Any, refusal: Any, adapter: Any, said: str) -> None:
    assert refusal(make({"adapter": adapter})).startswith(f"job 'first': {said}")


# --- data --------------------------------------------------------------------------------------------------------------

WORDS = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize(
    ("data", "top", "said"),
    [
        ({"max_length": 20}, {}, "over max_length 20; raise it, or set truncate to drop or right"),
        ({}, {"max_tokens_per_microbatch": 20}, "over max_tokens_per_microbatch 20; raise it, or set truncate"),
        ({"max_length": 20, "truncate": "drop"}, {}, "truncate: drop left no sample of 1 within max_length 20"),
        ({"max_length": 3, "truncate": "right"}, {}, "truncate: right left no sample of 1 within max_length 3"),
        ({"truncate": "drop"}, {"max_tokens_per_microbatch": 20}, "left no sample of 1 within max_tokens_per_microbatch 20"),
    ],
)  # fmt: skip
def test_a_sample_that_is_too_long_is_refused_with_the_limit(
    make: Any, refusal: Any, tmp_path: Path, data: Any, top: Any, said: str
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("\n" + json.dumps({"prompt": WORDS * 5, "completion": "dog"}) + "\n")
    (tmp_path / "short.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    tree = make({"data": {"path": str(path)} | data}, **top)
    tree["jobs"][0]["data"] = {"path": str(tmp_path / "short.jsonl")}
    message = refusal(tree)
    assert message.startswith("job 'first': ")
    assert said in message
    if "truncate" not in data:
        assert f"{path}, line 2: the sample has " in message


def test_samples_that_are_cut_to_a_microbatch_are_not_said_to_be_cut_to_max_length(make: Any, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": WORDS * 20}) + "\n")
    tree = make({"data": {"path": str(tmp_path / "long.jsonl"), "truncate": "right"}}, max_tokens_per_microbatch=60)
    prepared = prepare(packlora.Run.model_validate(tree))
    assert [text for text in prepared.warnings if "cut" in text] == ["job 'first': 1 sample was cut as too long"]


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": ""}, {"messages": [{"role": "user", "content": "a"}]}, {"text": ""}]
)
@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_a_sample_without_label_tokens_is_refused_with_its_line(
    make: Any, refusal: Any, write_rows: Rows, tmp_path: Path, row: Any, key: str
) -> None:
    path = tmp_path / "unlabelled.jsonl"
    path.write_text('{"text": "a b c"}\n' + json.dumps(row) + "\n")
    message = refusal(make({"data": {"path": write_rows("rows", 4)} | {key: str(path)}}))
    assert message.startswith(f"job 'first': {path}, line 2: the sample has no label tokens, so nothing to learn from")


def test_data_that_is_not_there_is_refused_with_the_job(
    make: Any, refusal: Any, write_rows: Rows, tmp_path: Path
) -> None:
    gone = str(tmp_path / "gone.jsonl")
    for data in ({"path": gone}, {"path": write_rows("rows", 4), "eval_path": gone}):
        assert refusal(make({"data": data})) == f"job 'first': the data file {gone} does not exist"


def test_too_few_samples_for_drop_last_are_refused(make: Any, refusal: Any) -> None:
    message = refusal(make({"train": {"global_batch_size": 5, "drop_last": True}}))
    assert message.startswith("job 'first': 4 samples do not fill one global batch of 5")


# --- init_from ---------------------------------------------------------------------------------------------------------


def peft_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> str:
    folder.mkdir()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict() | changes
    text = json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    (folder / "adapter_config.json").write_text(text)
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "adapter", "said"),
    [
        ({"peft_type": "IA3"}, {}, "describes 'IA3'; only LORA adapters can be continued"),
        ({"ensure_weight_tying": True}, {}, "uses ensure_weight_tying, which packlora does not support"),
        ({"lora_bias": True}, {}, "uses lora_bias, which packlora does not support"),
        ({"layer_replication": [[0, 1]]}, {}, "uses layer_replication, which packlora does not support"),
        ({"trainable_token_indices": [3, 3]}, {}, "trainable_token_indices: names a token twice"),
        ({"modules_to_save": ["("]}, {}, "modules_to_save: has '(', which is not a valid regular expression"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "has init_lora_weights 'pissa_niter_4', which goes with other base"),
        ({"init_lora_weights": "olora"}, {}, "has init_lora_weights 'olora', which goes with other base"),
        ({}, {"r": 8}, "adapter.r is 8, but"), ({}, {"lora_alpha": 16}, "adapter.lora_alpha is 16"),
        ({}, {"use_dora": True}, "adapter.use_dora is True, but"), ({}, {"bias": "all"}, "adapter.bias is 'all', but"),
        ({}, {"target_modules": ["v_proj"]}, "adapter.target_modules is ['v_proj'], but"),
        ({"target_modules": ["c_attn"]}, {}, "target_modules ['c_attn'] matches nothing in the model"),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_continued_is_refused(
    make: Any, refusal: Any, tmp_path: Path, changes: Any, adapter: Any, said: str
) -> None:
    folder = peft_folder(tmp_path / "start", **changes)
    message = refusal(make({"adapter": {"init_from": folder} | adapter}))
    assert message.startswith("job 'first': ")
    assert said in message


def test_an_adapter_folder_that_is_not_there_or_broken_is_refused(make: Any, refusal: Any, tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing", tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    for folder in (missing, broken, tmp_path):
        message = refusal(make({"adapter": {"init_from": str(folder)}}))
        assert message.startswith(f"job 'first': {folder} is not a PEFT adapter folder: ")


def test_an_adapter_with_other_tensors_than_the_model_needs_is_refused(make: Any, refusal: Any, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    whole = {name.format(layer, part): torch.zeros(4, 64) if part == "A" else torch.zeros(64, 4)
             for layer in range(2) for part in "AB"}  # fmt: skip
    cases = {
        "lacks": (
            {key: whole[key] for key in whole if "lora_B" not in key},
            f"lacks {name.format(0, 'B')} (and 1 more)",
        ),
        "more": (
            whole | {"base_model.model.x": torch.zeros(1)},
            "has 'base_model.model.x' (and 0 more), which is not of",
        ),
        "shape": (
            whole | {name.format(1, "A"): torch.zeros(4, 32)},
            "lora_A.weight' is (4, 32), the model needs (4, 64)",
        ),
        "none": (None, "cannot read "),
    }
    for case, (tensors, said) in cases.items():
        message = refusal(make({"adapter": {"init_from": peft_folder(tmp_path / case, tensors)}}))
        assert message.startswith("job 'first': "), case
        assert said in message, case
    result = packlora.train(
        packlora.Run.model_validate(make({"adapter": {"init_from": peft_folder(tmp_path / "whole", whole)}}))
    )
    assert result.status == "done"


# --- output folder -----------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_or_something_else_is_refused_and_keeps_every_byte(
    make: Any, refusal: Any, tmp_path: Path
) -> None:  # that every byte is kept is checked by the fixture
    out = tmp_path / "out"
    (out / "first").mkdir(parents=True)
    (out / "first" / "adapter_model.safetensors").write_bytes(b"precious")
    tree = make()
    said = refusal(tree)
    assert said == f"output_dir {out} is not empty and holds no run (found first); choose another folder"
    assert refusal(tree, "--resume") == said
    (out / "run.json").write_text('{"packlora": "0"}')
    assert refusal(tree) == f"output_dir {out} already holds a run; continue it with --resume, or choose another folder"
    assert f"output_dir {out}: run.json cannot be read" in refusal(tree, "--resume")


def test_an_output_folder_that_cannot_be_written_is_refused(make: Any, refusal: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for folder in (file, file / "out", file / "deep" / "out"):
        assert refusal(make(output_dir=str(folder))).startswith(f"output_dir {folder}: cannot write there: ")
    assert file.read_text() == "precious"


def test_a_refused_run_leaves_no_folder_behind(make: Any, refusal: Any, tmp_path: Path) -> None:
    refusal(make({"adapter": {"bias": "all"}}))
    assert not (tmp_path / "out").exists()
