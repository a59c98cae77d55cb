"""`packlora generate`, `chat` and `eval` from the command line, held against PEFT's own generation and the run's own losses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHAT
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import packlora
from packlora.adapters.files import TRAINED_ON
from packlora.answers import talk
from packlora.answers.talk import Sampling, load_speakers
from packlora.cli import app
from packlora.commands.held_out import evaluate_adapter
from packlora.errors import InputError

MESSAGES = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def run(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs, far enough from the base to answer otherwise."""
    from conftest import rows_into

    folder = tmp_path_factory.mktemp("run")
    write = rows_into(folder)
    packlora.train(
        {
            "base_model": tiny_base("llama"), "output_dir": str(folder / "out"), "max_tokens_per_microbatch": 64,
            "jobs": [
                {"name": "one", "data": {"path": write("one", 12, 1), "eval_path": write("held", 7, 5), "max_length": 99},
                 "adapter": {"r": 4}, "train": {"max_steps": 4, "learning_rate": 0.02}},
                {"name": "two", "data": {"path": write("two", 9, 2)}, "adapter": {"r": 3, "use_dora": True},
                 "train": {"max_steps": 3, "learning_rate": 0.02}},
            ],
        }
    )  # fmt: skip
    return folder / "out"


def peft_answer(run: Path, name: str | None, ids: torch.Tensor, tokens: int, ends: list[int]) -> torch.Tensor:
    base = json.loads((run / "one" / "adapter_config.json").read_text())["base_model_name_or_path"]
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if name is not None:
        model = PeftModel.from_pretrained(model, run / name)
    out: torch.Tensor = model.eval().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=ends or None,
    )
    return out[0, ids.shape[1] :]


def invoke(*words: str, **how: Any) -> Any:
    return CliRunner().invoke(app, [*words], **how)


def test_answers_are_those_of_peft_by_the_run_s_template_and_end_where_training_ends_a_turn(run: Path) -> None:
    speakers = load_speakers([run / "one", run / "two"], None, "auto", "cpu")
    tokenizer = speakers.tokenizer
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert set(speakers.ends) == {end, eos}
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    answers = {}
    for name in ("one", None, "two", "one"):  # the order changes nothing
        answers[name] = speakers.answer(name or "base", MESSAGES, Sampling(12))
        want = peft_answer(run, name, ids, 12, [end, eos])
        assert answers[name] == tokenizer.decode(want, skip_special_tokens=True)
    assert len(set(answers.values())) == 3, "adapters and base answer differently"
    drawn = [speakers.answer("one", MESSAGES, Sampling(12, 5.0, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    long = peft_answer(run, "two", ids, 12, [])
    assert len(long) == 12
    speakers.ends.append(long[3].item())  # what ends an answer does end it
    cut = speakers.answer("two", MESSAGES, Sampling(12))
    assert len(cut) < len(answers["two"]) and cut == tokenizer.decode(long[: long.tolist().index(long[3]) + 1])


def test_generate_reads_a_prompt_from_the_command_or_standard_input(run: Path) -> None:
    job = str(run / "one")
    told = invoke("generate", job, "--prompt", "the quick fox", "--max-new-tokens", "9")
    assert told.exit_code == 0, told.output
    speakers = load_speakers([run / "one"], None, "auto", "cpu")
    assert told.stdout.rstrip("\n") == speakers.answer("one", MESSAGES, Sampling(9)).rstrip("\n")
    newest = max(run.glob("one/checkpoint-*"))
    raw = invoke("generate", str(newest), "--raw", "--max-new-tokens", "5", input="the lazy dog")
    assert raw.exit_code == 0, raw.output
    assert raw.stdout.rstrip("\n") == speakers.answer("one", "the lazy dog", Sampling(5)).rstrip("\n")


def test_chat_answers_side_by_side_each_in_a_conversation_of_its_own(run: Path) -> None:
    words = [
        "chat",
        str(run / "one"),
        str(run / "two"),
        "--with-base",
        "--max-new-tokens",
        "6",
        "--system",
        "some more",
    ]
    out = invoke(
        *words,
        input="the quick fox\n\nand then\n/reset\nthe quick fox\n/system\nthe quick fox\n/help\n/exit\nand then\n",
    )
    assert out.exit_code == 0 and "/system TEXT begins anew" in out.stderr, out.output
    speakers = load_speakers([run / "one", run / "two"], None, "auto", "cpu")
    system, want = {"role": "system", "content": "some more"}, []
    told: dict[str, list[dict[str, str]]] = {}
    system_turns = [system]
    for line in ("the quick fox", "and then", None, "the quick fox", "", "the quick fox"):
        for name in ("base", "one", "two") if line else ():
            history = told.setdefault(name, list(system_turns))
            history.append({"role": "user", "content": line or ""})
            answer = speakers.answer(name, history, Sampling(6))
            history.append({"role": "assistant", "content": answer})
            want.append(f"{name}: " + answer)
        if not line:
            told.clear()
            system_turns = [system] if line is None else []
    assert out.stdout == "".join(f"{line}\n" for line in want)


def test_in_the_folder_of_an_adapter_it_answers_under_the_folder_s_name(run: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(run / "one")
    out = invoke("chat", ".", "../two", "--max-new-tokens", "3", input="the quick fox\n")
    assert out.exit_code == 0, out.output
    assert [line.partition(":")[0] for line in out.stdout.splitlines()] == ["one", "two"]


@pytest.fixture(scope="module")
def templated_run(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job on a base without a chat template, with one of its own that has a variable, and a message of the system."""
    folder = tmp_path_factory.mktemp("templated")
    shutil.copytree(tiny_base("llama"), folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()
    (folder / "own.jinja").write_text(
        CHAT.removesuffix("{% endif %}") + "{% if shy is defined %}some more{% endif %}{% endif %}"
    )
    rows = [{"prompt": text, "completion": "the same thing"} for text in ("the quick fox", "and then", "over the dog")]
    data = {"path": str(folder / "rows.jsonl"), "chat_template": str(folder / "own.jinja"), "system": "the lazy dog"}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packlora.train(
        {
            "base_model": str(folder / "base"), "output_dir": str(folder / "out"), "sample_prompts": ["the quick fox"],
            "sample_max_new_tokens": 9, "eval_every": 5,
            "jobs": [
                {"name": "own", "data": data | {"eval_path": data["path"], "chat_template_kwargs": {"shy": True}},
                 "adapter": {"r": 4}, "train": {"max_steps": 5, "learning_rate": 0.02}},
            ],
        }
    )  # fmt: skip
    return folder / "out"


def test_answers_are_those_of_the_run_s_own_sample_prompts_by_every_way_to_ask(
    templated_run: Path,
) -> None:
    last = json.loads((templated_run / "samples.jsonl").read_text().splitlines()[-1])
    (sample,), job = last["samples"], templated_run / "own"
    how = ["--max-new-tokens", "9", "--system", "the lazy dog"]
    told = invoke("generate", str(job), "--prompt", sample["prompt"], *how)
    assert told.exit_code == 0 and told.stdout == sample["text"] + "\n", told.output
    assert packlora.generate(job, [sample["prompt"]], system="the lazy dog", max_new_tokens=9) == [sample["text"]]
    assert packlora.generate(job, [sample["prompt"]], raw=True, max_new_tokens=9) != [sample["text"]]
    told = invoke("chat", str(job), *how, input=sample["prompt"] + "\n")
    assert told.stdout == sample["text"] + "\n", told.output
    told = invoke("chat", str(job), "--with-base", input="")
    assert "packlora: base: the tokenizer has no chat template: each line" in told.stderr, told.output


def test_a_template_that_takes_the_system_by_a_variable_of_the_run_takes_it_in_a_chat(
    templated_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(templated_run, tmp_path / "out")
    template = tmp_path / "out" / "own" / "chat_template.jinja"
    refuses = (
        "{% if shy is not defined and messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    template.write_text(refuses + template.read_text())
    how = ["--system", "the lazy dog", "--max-new-tokens", "3"]
    told = invoke("chat", str(template.parent), *how, input="a\n")
    assert told.exit_code == 0, told.output
    assert told.stdout == invoke("generate", str(template.parent), "--prompt", "a", *how).stdout


def test_a_system_message_of_the_run_that_is_left_out_is_noted(templated_run: Path, run: Path) -> None:
    job, note = str(templated_run / "own"), "own was trained with the system message 'the lazy dog'"
    for words, noted in (
        (["generate", job, "--prompt", "a"], True), (["generate", job, "--prompt", "a", "--system", "b"], False),
        (["generate", job, "--prompt", "a", "--raw"], False), (["generate", str(run / "one"), "--prompt", "a"], False),
        (["chat", job], True), (["chat", job, "--system", "b"], False),
    ):  # fmt: skip
        out = invoke(*words, "--max-new-tokens", "2", input="a\n")
        assert out.exit_code == 0 and (note in out.stderr) == noted, (words, out.output)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"prompts": [{"role": "user", "content": "a"}]},
            r"prompts\[0\]: found .*; a prompt is a text, or a conversation as",
        ),
        ({"prompts": ["a", None]}, r"prompts\[1\]: found None"),
        ({"prompts": [[{"role": "user"}]]}, r"prompts\[0\]: the content of message 1 \(user\) must be a text"),
        ({"prompts": [[]]}, r"prompts\[0\]: 'messages' must be a list of at least one"),
        ({"prompts": ["<|im_start|>user\na"]}, "as a text that was rendered before"),
        ({"prompts": ["a"], "max_new_tokens": "3"}, "max_new_tokens: found '3', not a whole number"),
        ({"prompts": ["a"], "seed": 1.5}, "seed: found 1.5, not a whole number"),
        ({"prompts": ["a"], "temperature": "hot"}, "temperature: found 'hot', not a number"),
    ],
)
def test_python_refuses_what_cannot_be_asked_by_name(asked: dict[str, Any], said: str, run: Path) -> None:
    with pytest.raises(InputError, match=said):
        packlora.generate(run / "one", **asked)


def test_eval_takes_columns_of_the_run_of_its_sources_or_the_usual_names(
    tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    """The same samples in files of other names have the same loss."""
    names = {"usual": ("prompt", "completion"), "own": ("question", "answer"), "others": ("asked", "told")}
    for file, (prompt, completion) in names.items():
        (tmp_path / f"{file}.jsonl").write_text(json.dumps({prompt: "the fox", completion: "the lazy dog"}) + "\n")
    paths = {file: str(tmp_path / f"{file}.jsonl") for file in names}
    columns = {file: dict(zip(names["usual"], own, strict=True)) for file, own in names.items()}
    jobs = {
        "all": {"path": paths["own"], "columns": columns["own"]},
        "each": {
            "path": [{"path": paths[file], "columns": columns[file]} for file in ("own", "others")],
            "on_bad_row": "skip",
        },
    }
    out = packlora.train(
        {
            "base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "out"),
            "jobs": [{"name": name, "data": data, "train": {"max_steps": 1}} for name, data in jobs.items()],
        }
    )  # fmt: skip
    loss = {(job, file): evaluate_adapter(out[job].path, paths[file]).loss for job, file in (
        ("all", "own"), ("all", "usual"), ("each", "own"), ("each", "others"), ("each", "usual"))}  # fmt: skip
    assert loss["all", "own"] == loss["all", "usual"]
    assert loss["each", "own"] == loss["each", "others"] == loss["each", "usual"]
    (tmp_path / "late.jsonl").write_text('{"asked": "no answer"}\n' + Path(paths["others"]).read_text())
    assert evaluate_adapter(out["each"].path, str(tmp_path / "late.jsonl")).loss == loss["each", "others"]
    with pytest.raises(
        InputError, match=r"there is no 'question', which data\.columns names for prompt; the row has asked"
    ):
        evaluate_adapter(out["all"].path, paths["others"])


def test_eval_reads_rows_as_the_run_of_the_adapter_did(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path
) -> None:
    held = Path(write_rows("held", 3))
    held.write_text(held.read_text() + '{"prompt": "no completion"}\n')
    data = {"path": write_rows("rows", 2), "eval_path": str(held), "system": "some more", "on_bad_row": "skip"}
    result = packlora.train(
        {
            "base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"),
            "jobs": [{"name": "one", "data": data, "train": {"max_steps": 1}}],
        }
    )  # fmt: skip
    found, trained = evaluate_adapter(tmp_path / "out" / "one", str(held)), result.jobs["one"].eval_after
    assert trained is not None and math.isclose(found.loss, trained, rel_tol=1e-6) and found.samples == 3


@pytest.mark.parametrize("truncate", ["drop", "right"])
def test_eval_leaves_out_and_cuts_what_microbatches_of_the_run_did_not_hold(
    truncate: str, tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path
) -> None:
    held = write_rows("held", 12, 3)
    data = {"path": write_rows("rows", 12), "eval_path": held, "truncate": truncate}
    result = packlora.train(
        {
            "base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "out"), "max_tokens_per_microbatch": 48,
            "jobs": [{"name": "one", "data": data, "train": {"max_steps": 1}}],
        }
    )  # fmt: skip
    folder, trained = tmp_path / "out" / "one", result.jobs["one"].eval_after
    assert trained is not None and math.isclose(evaluate_adapter(folder, held).loss, trained, rel_tol=1e-6)
    whole = evaluate_adapter(folder, held, truncate="error")
    assert whole.samples == 12 and not math.isclose(whole.loss, trained, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (None, [], "the data file {} does not exist"),
        ('{"x": 1}', [], "{}, line 1: found x"),
        ('{"prompt": "a", "completion": "b"}', ["--max-length", "2", "--truncate", "drop"], "{}: truncate: drop left no"),
        ('{"prompt": "a", "completion": "b"}', ["--truncate", "up"], "packlora eval:\n  data.truncate: input should be"),
        ('{"instruction": "a", "output": "b"}', [], "note: {}: Alpaca's instructions"),
    ],
)  # fmt: skip
def test_eval_names_the_files_that_were_given_and_no_job(
    rows: str | None, options: list[str], said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        Path("rows.jsonl").write_text(rows)
    out = invoke("eval", str(run / "one"), "rows.jsonl", *options)
    assert out.exit_code == (0 if "note" in said else 2)
    assert said.format("rows.jsonl") in out.stderr and "job" not in out.stderr, out.output
    if not out.exit_code:
        assert out.stdout.endswith(", 1 sample\n")


def test_eval_computes_the_loss_as_training_did_and_as_peft_does(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    last = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines() if '"one"' in line][-1]
    data = record["config"]["jobs"][0]["data"]["eval_path"]
    found = evaluate_adapter(run / "one", data)
    assert math.isclose(found.loss, last["eval_loss"], rel_tol=1e-6) and found.samples == 7
    base = record["model"]["path"]
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    peft, total, labels = PeftModel.from_pretrained(model, run / "one").eval(), 0.0, 0
    for line in Path(data).read_text().splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")
        ids, start = (tokenizer(t, add_special_tokens=False, return_tensors="pt")["input_ids"] for t in (whole, prompt))
        with torch.no_grad():
            logits = peft(ids).logits[0].double()
        n = start.shape[1]
        total += torch.nn.functional.cross_entropy(logits[n - 1 : -1], ids[0, n:], reduction="sum").item()
        labels += ids.shape[1] - n
    assert labels == found.label_tokens and math.isclose(found.loss, total / labels, rel_tol=1e-5)
    shown = invoke("eval", str(run / "one"), data)
    assert shown.exit_code == 0 and f"loss        {found.loss:.6f}" in shown.stdout
    assert f"{labels:,} of {found.tokens:,} tokens, 7 samples" in shown.stdout


def test_what_cannot_answer_is_refused_in_a_sentence(
    run: Path, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    job, other = str(run / "one"), tmp_path / "other"
    other.mkdir()
    for file in (run / "one").glob("adapter_*"):
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": tiny_base("qwen2")}))
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "the same thing again and again"}\n')
    for words, said in (
        (["generate", str(run), "--prompt", "a"], f"but that of a run; its adapters are {run}/one, {run}/two"),
        (["export", str(run), str(tmp_path / "out"), "--for", "peft"], f"its adapters are {run}/one, {run}/two"),
        (["eval", str(run / "three"), "-"], "three is not a PEFT adapter folder: there is no such folder; that of a run's job"),
        (["chat", str(tmp_path)], f"it holds no adapter_config.json, but adapters by their names: {other}; give one"),
        (["chat", tiny_base("llama")], "is not a PEFT adapter folder: it holds no adapter_config.json; that of a run's job"),
        (["generate", job, "--raw", "--prompt", ""], "no tokens"),
        (["generate", job], "there is no prompt on standard input; give one there, or by --prompt"),
        (["generate", job, "--raw", "--prompt", "the fox " * 300], "the model's context 256"),
        (["generate", job, "--raw", "--system", "s", "--prompt", "a"], "a system message goes by the chat template"),
        (["generate", job, "--prompt", "a", "--dtype", "int8"], "dtype 'int8' is not one of"),
        (["generate", job, "--prompt", "a", "--device", "tpu"], "'tpu'"),
        (["generate", job, "--prompt", "a", "--base-model", str(tmp_path)], "--base-model names another one"),
        (["chat", job, str(other)], "several base models"),
        (["chat", job, job], "is given twice"),
        (["eval", job, str(tmp_path / "no.jsonl")], "does not exist"),
        (["eval", job, str(data), "--truncate", "left"], "truncate"),
        (["eval", job, str(data), "--max-length", "3"], "over max_length 3"),
    ):  # fmt: skip
        out = invoke(*words, input="")
        assert out.exit_code == 2 and said in out.output, (words, out.output)
        assert "Traceback" not in out.output


def test_an_adapter_of_codes_that_are_not_made_here_says_on_what_it_answers(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "one"
    shutil.copytree(run / "one", folder)
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, {TRAINED_ON: json.dumps({"method": "gptq"})})
    load_speakers([folder], None, "auto", "cpu")
    assert (
        "one was trained on a base model in 'gptq', and answers here on the base's own weights"
        in capsys.readouterr().err
    )


def test_a_person_at_a_terminal_has_a_prompt_and_ends_with_ctrl_d(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lines, asked = ["the quick fox", ""], []

    def given(prompt: str) -> str:
        asked.append(prompt)
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", given)
    assert [*talk._typed()] == ["the quick fox", ""] and asked == ["> "] * 3
    assert capsys.readouterr().out == "\n", "the shell's prompt begins a line of its own"
