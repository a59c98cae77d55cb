"""Keys of a job's data by which files are trained on as they are: columns, subset and split, max_samples, eval_split, and chat
templates; and rows as data sets are published. Each is held against the plain row, or the text, that it stands for."""

from __future__ import annotations

import copy
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_data_forms import parts, save_to_disk
from test_learnt_as_in_trl import FILES, learnt, tokenizer_of
from tokenizers import AddedToken

from packlora.config import DataConfig, DataSource
from packlora.config.data import TEMPLATES
from packlora.data.chat_templates import ENDS, with_template
from packlora.data.encode import Encoded, Sample
from packlora.data.mixture import split_off_held_out
from packlora.data.prompts import encode_prompts
from packlora.data.readers import read_data, rows_of
from packlora.data.rows import Row, check_row
from packlora.data.samples import encode_rows
from packlora.data.template import Template
from packlora.errors import InputError
from packlora.run_file import run_from

ASKED: list[dict[str, Any]] = [
    {"question": "the fox", "answer": "the dog", "text": "a passage", "id": 1, "sys": "be brief"},
    {"question": "over", "answer": "lazy", "text": "", "id": 2, "sys": None},
]
NAMES = {"prompt": "question", "completion": "answer", "system": "sys"}


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def as_json(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def as_csv(folder: Path, rows: list[dict[str, Any]]) -> Path:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "rows.csv"


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


FORMS = pytest.mark.parametrize("write", [jsonl, as_json, as_csv, as_parquet])


def read(path: Path | str, on_bad_row: str = "error", pairs: bool = False, **how: Any) -> list[Row]:
    return read_data(DataSource(path=str(path), **how), "first", on_bad_row=on_bad_row, pairs=pairs).rows


def refusal(path: Path | str, **how: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(path, **how)
    return str(caught.value)


# --- columns ---------------------------------------------------------------------------------------------------------------


@FORMS
def test_columns_are_read_under_the_names_of_a_row_and_other_kinds_of_fields_are_no_fields(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    rows = read(write(tmp_path, ASKED), columns=NAMES)
    assert [(row.prompt, row.completion, row.system) for row in rows] == [
        ("the fox", "the dog", "be brief"), ("over", "lazy", None),
    ]  # fmt: skip


@FORMS
def test_a_column_that_is_not_there_is_refused_with_the_line_and_the_columns_that_are(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(tmp_path, [{"question": "a", "reply": "b"}])
    line = {".jsonl": "line 1", ".csv": "line 2"}.get(path.suffix, "row 1")
    said = refusal(path, columns={"prompt": "question", "completion": "answer"})
    begun = f"job 'first': {path}, {line}: there is no 'answer', which data.columns names for completion; the row has "
    assert said.startswith(begun) and set(said.removeprefix(begun).split(", ")) == {"question", "reply"}


def test_a_bad_name_skips_its_row_alone_where_rows_are_skipped(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [ASKED[0], {"question": "a"}, ASKED[1]])
    rows = read(path, "skip", columns={"prompt": "question", "completion": "answer"})
    assert [row.prompt for row in rows] == ["the fox", "over"]


# --- how many, and which part of a data set ----------------------------------------------------------------------------------


@FORMS
def test_no_more_rows_are_read_than_max_samples(write: Callable[..., Path], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n}", "completion": "b"} for n in range(3)]
    path = write(tmp_path, [*rows, {"prompt": None, "completion": None}])
    assert [row.prompt for row in read(path, max_samples=3)] == ["0", "1", "2"]
    if path.suffix != ".json":  # which is not streamed
        assert len(list(rows_of(DataSource(path=str(path), max_samples=2), "first"))) == 2
    if path.suffix in (".jsonl", ".parquet"):
        assert "line 4" in (said := refusal(path)) or "row 4" in said


def test_a_subset_and_a_split_of_the_hub_are_asked_of_the_library() -> None:
    table = pyarrow.table({"q": ["a"]})
    rows = SimpleNamespace(with_format=lambda form: SimpleNamespace(iter=lambda size: iter([table])))
    asked: list[Any] = []

    def load_dataset(*words: str, **how: str) -> Any:
        asked.append((words, how))
        return rows

    with mock.patch.dict(sys.modules, {"datasets": SimpleNamespace(load_dataset=load_dataset)}):
        (row,) = read("owner/set", subset="main", split="test", columns={"text": "q"})
        read("owner/set", columns={"text": "q"})
    assert row.text == "a"
    assert asked == [(("owner/set", "main"), {"split": "test"}), (("owner/set",), {"split": "train"})]


def test_a_split_of_a_saved_data_set_is_its_folder_and_files_have_none(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "splits" / "train", {"text": "a"})
    save_to_disk(tmp_path / "splits" / "test", {"text": "b"})
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [row.text for row in read(tmp_path / "splits", split="test")] == ["b"]
    assert "has no split val (splits: test, train); name one by data.split" in refusal(tmp_path / "splits", split="val")
    assert "has no split ../splits/test" in refusal(tmp_path / "splits", split="../splits/test")
    assert "is no data set with splits" in refusal(tmp_path / "splits" / "test", split="test")
    path = jsonl(tmp_path, ASKED)
    assert "data.split 'test' is of a data set" in refusal(path, split="test")
    assert "data.subset 'main' is of a data set" in refusal(path, subset="main")


# --- published rows ----------------------------------------------------------------------------------------------------------


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


ULTRAFEEDBACK = {
    "prompt": "q", "prompt_id": "x", "chosen": turns("q", "good"), "rejected": turns("q", "bad"),
    "messages": turns("q", "good"), "score_chosen": 8.0, "score_rejected": 2.5,
}  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        ULTRAFEEDBACK, {key: own for key, own in ULTRAFEEDBACK.items() if key != "messages"},
        {key: own for key, own in ULTRAFEEDBACK.items() if key not in ("messages", "prompt")},
        {"prompt": "q", "chosen": [turns("q", "good")[1]], "rejected": [turns("q", "bad")[1]]},
    ],
)  # fmt: skip
def test_ultrafeedback_s_rows_are_pairs_and_for_sft_their_conversation(row: dict[str, Any], tmp_path: Path) -> None:
    path = jsonl(tmp_path, [row])
    (read_row,) = read(path, pairs=True)
    assert read_row.pair is not None
    wanted = [*({**turn, "weight": 0} for turn in turns("q")), turns("", "good")[1]]
    assert read_row.pair[0].messages == wanted
    if "messages" in row:
        (conversation,) = read(path)
        assert conversation.messages == row["messages"]


def test_rows_that_could_be_read_in_two_ways_are_refused_with_the_key_that_decides(tmp_path: Path) -> None:
    other = ULTRAFEEDBACK | {"messages": turns("q", "another")}
    assert "several kinds" in (said := refusal(jsonl(tmp_path, [other]), pairs=True)) and "data.columns" in said
    pairs = {"chosen": "chosen", "rejected": "rejected"}
    assert read(jsonl(tmp_path, [other]), pairs=True, columns=pairs)[0].pair is not None
    unlike = ULTRAFEEDBACK | {"messages": None, "prompt": "something else"}
    assert "do not begin with the prompt; name the parts by data.columns" in refusal(jsonl(tmp_path, [unlike]))


def test_alpaca_s_own_text_column_repeats_the_row_and_another_text_is_refused(tmp_path: Path) -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    text = "Below is an instruction.\n\n### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n3"
    (found,) = read(jsonl(tmp_path, [row | {"text": text}]))
    assert (found.prompt, found.completion) == ("add\n\n1 2", "3")
    assert "data.columns" in refusal(jsonl(tmp_path, [row | {"text": "a text of its own"}]))


# --- what may stand together -------------------------------------------------------------------------------------------------

MANY = [{"path": "a"}, {"path": "b"}]
STREAM = {"path": "d", "streaming": True, "truncate": "drop", "on_bad_row": "skip"}
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"path": "d", "eval_path": "e", "eval_split": 0.1}, "has eval_path and eval_split"),
    ({"path": "d", "eval_split": 1.0}, "less than 1"), ({"path": "d", "eval_split": 0}, "greater than 0"),
    ({"path": MANY, "max_samples": 3}, "max_samples could be of each source or of all; give it to the sources"),
    ({"path": MANY, "split": "x"}, "split could be of each source"), ({"path": MANY, "subset": "x"}, "subset could be"),
    ({"path": "d", "columns": {"question": "prompt"}}, "names a column for 'question'; a row has prompt, completion"),
    ({"path": "d", "columns": {"prompt": "a", "completion": "a"}}, "gives one column to two fields"),
    ({"path": "d", "columns": {"prompt": ""}}, "has no name of a column for prompt"),
    (STREAM | {"eval_split": 0.1}, "eval_split does not go with streaming"),
    ({"path": "d", "chat_template_kwargs": {"tools": []}}, "'tools', which is no variable of a chat template"),
    ({"path": [{"path": "a", "colums": {}}]}, "did you mean 'columns'"),
]  # fmt: skip


def run_of(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    job = {"name": "first", "data": data, "train": {"max_steps": 3}}
    return {"base_model": "m", "output_dir": "o", "jobs": [job]} | more


@pytest.mark.parametrize(("data", "said"), TOGETHER)
def test_keys_that_do_not_go_together_are_refused_by_name(data: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        run_from(run_of(data))
    assert said in str(caught.value) and "job 'first': data" in str(caught.value)


def test_a_sweep_compares_candidates_by_what_is_held_out_in_all_of_them() -> None:
    sweep = {"job": "first", "parameters": {"adapter.r": [1, 2]}}
    assert run_from(run_of({"path": "d", "eval_split": 0.1}, sweep=sweep)).sweep is not None
    for key, values in (("seed", [1, 2]), ("data.max_samples", [1, 2])):
        with pytest.raises(InputError, match="decides what is held out"):
            run_from(run_of({"path": "d", "eval_split": 0.1}, sweep=sweep | {"parameters": {key: values}}))


def test_sources_have_their_own_keys_and_the_columns_of_the_job_where_they_have_none() -> None:
    own = {"path": "b", "columns": {"text": "x"}, "max_samples": 5, "split": "s"}
    data = DataConfig.model_validate({"path": ["a", own], "columns": {"text": "y"}, "eval_path": "e"})
    first, second = data.train_sources
    assert (first.path, first.columns, first.max_samples) == ("a", {"text": "y"}, None)
    assert second.model_dump() == DataSource.model_validate(own).model_dump()
    assert [one.columns for one in data.eval_sources] == [{"text": "y"}]


# --- held out ----------------------------------------------------------------------------------------------------------------


def drawn(
    share: float, sizes: tuple[int, ...], seed: int = 0, weights: Any = None
) -> tuple[list[list[Any]], list[Any]]:
    """What is left of each source, and what is held out: (source, number) of samples."""
    sources = [{"path": f"{k}", "weight": weights and weights[k]} for k in range(len(sizes))]
    data = DataConfig.model_validate({"path": sources, "eval_split": share})
    kept, out = split_off_held_out(parts(*sizes), data, seed, "first")
    return [[tuple(s.ids.tolist()) for s in part.samples] for part in kept], [
        tuple(s.ids.tolist()) for s in out.samples
    ]


def test_a_share_is_held_out_by_the_seed_alone_in_order_and_nothing_is_in_both() -> None:
    kept, out = drawn(0.25, (10, 10))
    every = [(source, n) for source in (0, 1) for n in range(10)]
    assert len(out) == 5 and sorted(out + kept[0] + kept[1]) == every
    assert out == sorted(out) and all(part == sorted(part) for part in kept)
    assert drawn(0.25, (10, 10)) == (kept, out) != drawn(0.25, (10, 10), seed=1)
    seen = {one for seed in range(40) for one in drawn(0.25, (10, 10), seed)[1]}
    assert len(seen) == 20, "every sample may be drawn"


@pytest.mark.parametrize(
    ("share", "size", "said"),
    [(0.05, 4, "of 4 samples data.eval_split 0.05 is 0, so none is held out"), (0.9, 3, "is 3, so none is left to train on"),
     (0.5, 1, "none is left")],
)  # fmt: skip
def test_a_share_that_leaves_one_side_without_a_sample_is_refused(share: float, size: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        drawn(share, (size,))


def test_a_source_with_a_weight_keeps_a_sample() -> None:
    with pytest.raises(InputError, match="holds out all samples of 1"):
        drawn(0.95, (30, 1), seed=0, weights=(1, 1))


def test_drawing_leaves_the_samples_of_other_jobs_as_they_are() -> None:
    shared = Encoded([Sample(np.array([0, n], np.int32), np.array([False, True])) for n in range(6)], truncated=2)
    kept, out = split_off_held_out([shared], DataConfig(path="d", eval_split=0.5), 0, "first")
    assert (len(shared.samples), len(kept[0].samples), len(out.samples)) == (6, 3, 3)
    assert (kept[0].truncated, out.truncated) == (2, 0)


# --- chat templates ----------------------------------------------------------------------------------------------------------

TALK = [{"role": "system", "content": "be brief"}, *turns("hi", "yo", "and?", "no")]
TWINS = {"chatml": "qwen2_5", "llama3": "llama3", "gemma": "gemma"}
"""Published templates that write the same, for conversations with a message of the system, but for Gemma, which has none."""
BY_HAND = {
    "zephyr": "<|system|>\nbe brief<eos>\n<|user|>\nhi<eos>\n<|assistant|>\nyo<eos>\n<|user|>\nand?<eos>\n"
    "<|assistant|>\nno<eos>\n",
    "alpaca": "be brief\n\n### Instruction:\nhi\n\n### Response:\nyo<eos>\n\n### Instruction:\nand?\n\n"
    "### Response:\nno<eos>\n\n",
    "vicuna": "be brief USER: hi ASSISTANT: yo<eos>USER: and? ASSISTANT: no<eos>",
}
ANSWERS = {"chatml": "{}<|im_end|>", "llama3": "{}<|eot_id|>", "gemma": "{}<end_of_turn>", "vicuna": " {}<eos>"}


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_known_template_writes_what_is_published_and_only_answers_are_learnt(name: str) -> None:
    (file,) = (file for file in FILES if file.stem == TWINS.get(name, "qwen2_5"))
    published, said = tokenizer_of(file.read_text()), TALK[name == "gemma" :]
    published.add_tokens([AddedToken(end, special=True) for end in ENDS.values()], special_tokens=True)
    own = with_template(published, name, "first")
    assert published.chat_template == file.read_text(), "the tokenizer of other jobs stays as it is"
    for generation in (False, True):
        some = said[:-1] if generation else said
        text = Template(own).render(some, generation)
        if name in TWINS:
            begins = "" if name == "chatml" else "<bos>"
            assert text.removeprefix("<bos>") == Template(published).render(some, generation).removeprefix(begins)
        else:
            written = BY_HAND[name] if not generation else BY_HAND[name].rpartition("no<eos>")[0]
            assert text == (written.rstrip(" ") if generation else written)
    assert learnt(own, said) == [ANSWERS.get(name, "{}<eos>").format(answer) for answer in ("yo", "no")]


def test_a_template_whose_end_the_base_has_no_token_for_is_refused_with_those_that_end(tokenizer: Any) -> None:
    with pytest.raises(InputError) as caught:
        with_template(tokenizer, "llama3", "first")
    assert "job 'first': data.chat_template 'llama3': it ends an answer with <|eot_id|>" in str(caught.value)
    assert "zephyr, alpaca, vicuna end with the tokenizer's own eos_token" in str(caught.value)


def test_a_template_is_read_from_a_file_or_the_folder_of_another_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "chat.txt").write_text(source)
    (tmp_path / "marked.txt").write_text(source, encoding="utf-8-sig")  # as editors on Windows write it
    other = copy.deepcopy(tokenizer)
    other.chat_template = source
    other.save_pretrained(tmp_path / "saved")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    for given in ("chat.txt", "marked.txt", "saved", "older"):
        assert with_template(tokenizer, str(tmp_path / given), "first").chat_template == source


BAD_TEMPLATES: list[tuple[str, str | None, str]] = [
    ("gone.jinja", None, "there is no such file or folder; known names are chatml, llama3"),
    ("plain.txt", "no program", "holds no chat template"), ("large.txt", "{" * (2**20 + 1), "has more than 1048576 bytes"),
    ("one/tokenizer_config.json", "{}", "holds no chat template"), ("one/other", "{", "no folder with chat_template.jinja or"),
    ("one/tokenizer_config.json", "[", "cannot read"),
    ("one/tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "{{ a }}"}]}', "the one of several"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), BAD_TEMPLATES)
def test_what_is_no_template_is_refused_by_name(
    name: str, text: str | None, said: str, tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as caught:
        with_template(tokenizer, str(tmp_path / name.partition("/")[0]), "first")
    assert said in str(caught.value)


def test_a_known_name_that_is_also_a_file_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zephyr").write_text("{{ messages }}")
    with pytest.raises(InputError, match=r"write \./zephyr for the file"):
        with_template(tokenizer, "zephyr", "first")
    assert with_template(tokenizer, "./zephyr", "first").chat_template == "{{ messages }}"


THINKING = (
    "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' and not enable_thinking %}<think></think>{% endif %}"
    "\n{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant"
    "{% if not enable_thinking %}<think></think>{% endif %}\n{% endif %}"
)


def encoded(tokenizer: Any, row: dict[str, Any], **data: Any) -> str:
    config = DataConfig(path="-", **data)
    (sample,) = encode_rows([check_row(row, "row 1", "j")], tokenizer, config, 4096, "j").samples
    return str(tokenizer.decode(sample.ids.tolist()))


def test_variables_of_a_job_are_those_of_rows_and_prompts_and_a_row_s_own_go_before_them(tokenizer: Any) -> None:
    thinks = copy.deepcopy(tokenizer)
    thinks.chat_template = THINKING
    row: dict[str, Any] = {"messages": turns("a", "b")}
    on, off = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False))
    assert (
        encoded(thinks, row, **on)
        == encoded(thinks, row | on)
        != encoded(thinks, row | off)
        == encoded(thinks, row, **off)
    )
    assert encoded(thinks, row | on, **off) == encoded(thinks, row | on)
    for job in (on, off):
        (prompt,) = encode_prompts(["a"], thinks, DataConfig(path="-", **job), 8, 4096, "j")
        wanted = thinks.apply_chat_template(
            turns("a"), add_generation_prompt=True, tokenize=False, **job["chat_template_kwargs"]
        )
        assert thinks.decode(prompt.ids.tolist()) == wanted


def test_variables_that_nothing_would_see_are_refused(tokenizer: Any) -> None:
    own: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(
        InputError, match="chat_template_kwargs has 'enable_thinking', which the chat template does not use"
    ):
        encoded(tokenizer, {"messages": turns("a", "b")}, **own)
    with pytest.raises(InputError, match=r"data\.chat_template_kwargs goes with prompts and messages"):
        encoded(tokenizer, {"text": "a"}, **own)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(InputError, match=r"data\.chat_template_kwargs needs a chat template"):
        encoded(bare, {"prompt": "a", "completion": "b"}, **own)
