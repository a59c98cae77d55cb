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
