"""Forms of rows and places of data that people have: each is read as the plain row that it stands for, and what is learnt of
it is what a hand-made expectation says, token by token."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from packlora.config import DataConfig, DataSource
from packlora.data import mixture
from packlora.data.encode import Encoded, Sample
from packlora.data.formats import csv
from packlora.data.readers import files_of, is_there, read_data, read_rows
from packlora.data.rows import How
from packlora.data.samples import encode_rows
from packlora.errors import InputError

USER, ASSISTANT, SYSTEM = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_start|>system\n"
END = "<|im_end|>"


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def encode(tokenizer: Any, path: Path | str, **data: Any) -> Encoded:
    read = read_data(str(path), "first", on_bad_row=data.get("on_bad_row", "error"))
    return encode_rows(read.rows, tokenizer, DataConfig(path=str(path), **data), 4096, "first")


def refusal(tokenizer: Any, path: Path | str, **data: Any) -> str:
    with pytest.raises(InputError) as caught:
        encode(tokenizer, path, **data)
    assert str(caught.value).startswith("job 'first': ")
    return str(caught.value)


def test_two_texts_under_other_names_are_refused_with_the_names_to_take(tokenizer: Any, tmp_path: Path) -> None:
    said = "found question, answer; where question is asked and answer is to be learnt, name them prompt and completion"
    assert said in refusal(tokenizer, write(tmp_path, "question,answer", "a,b", name="rows.csv"))
    assert "name them" not in refusal(tokenizer, write(tmp_path, {"question": "a", "answer": 1}))


def expected(tokenizer: Any, *parts: tuple[str, bool]) -> tuple[list[int], list[bool]]:
    """Token ids and labels of texts written by hand, each learnt or not. Special tokens keep texts apart, so that each can be
    tokenized by itself where the next begins with one."""
    ids, labels = [], []
    for text, learnt in parts:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += own
        labels += [learnt] * len(own)
    return ids, labels


def check(tokenizer: Any, sample: Sample, *parts: tuple[str, bool]) -> None:
    ids, labels = expected(tokenizer, *parts)
    assert (sample.ids.tolist(), sample.is_label.tolist()) == (ids, labels)


TURNS = [
    (f"{SYSTEM}the lazy{END}\n", False), (f"{USER}the quick{END}\n", False), (ASSISTANT, False), (f"brown{END}", True),
    (f"\n{USER}fox{END}\n", False), (ASSISTANT, False), (f"jumps over{END}", True),
]  # fmt: skip
"""A conversation as the tests' template renders it, by hand; what follows the last label is left out."""
SHARED = [{"from": "human", "value": "the quick"}, {"from": "gpt", "value": "brown"},
          {"from": "human", "value": "fox"}, {"from": "gpt", "value": "jumps over"}]  # fmt: skip


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROMPT = [turn("system", "the lazy"), turn("user", "the quick"), turn("assistant", "brown"), turn("user", "fox")]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "system", "value": "the lazy"}, *SHARED]}, {"conversations": SHARED, "system": "the lazy"},
        {"messages": [*PROMPT, turn("assistant", "jumps over")]},
        {"messages": [*PROMPT[1:], turn("assistant", "jumps over")], "system": "the lazy"},
    ],
)  # fmt: skip
def test_of_a_conversation_in_any_form_exactly_the_turns_of_the_assistant_are_learnt(
    row: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    (sample,) = encode(tokenizer, write(tmp_path, row)).samples
    check(tokenizer, sample, *TURNS)


def test_a_message_of_the_system_goes_before_prompts_and_conversations_that_have_none(
    tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "system": "fox"},
            {"messages": [turn("user", "a"), turn("assistant", "b")]},
            {"messages": [turn("system", "fox"), turn("user", "a"), turn("assistant", "b")]}]  # fmt: skip
    samples = encode(tokenizer, write(tmp_path, *rows), system="lazy dog").samples
    for sample, system in zip(samples, ["lazy dog", "fox", "lazy dog", "fox"], strict=True):
        check(
            tokenizer, sample, (f"{SYSTEM}{system}{END}\n{USER}a{END}\n", False), (ASSISTANT, False), (f"b{END}", True)
        )


def test_token_ids_are_taken_as_they_are_and_learnt_where_a_label_says_so(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, -100], "attention_mask": [1] * 5},
            {"input_ids": [5, 6, 7]}, {"input_ids": [5, 6], "labels": [5, 6], "text": None}]  # fmt: skip
    found = [(s.ids.tolist(), s.is_label.tolist()) for s in encode(tokenizer, write(tmp_path, *rows)).samples]
    F, T = False, True
    assert found == [([5, 6, 7, 8], [F, T, F, T]), ([5, 6, 7], [F, T, T]), ([5, 6], [F, T])]
    assert encode(tokenizer, write(tmp_path, *rows)).samples[0].ids.dtype == np.int32


def test_token_ids_that_the_model_lacks_are_refused_with_their_line_or_left_out(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"input_ids": [5, 49]}, {"input_ids": [5, 7, 50, 6], "labels": [-100, 7, -100, 6]})
    data = DataConfig(path=str(path))
    rows, vocabulary = read_data(str(path), "first").rows, {"target_vocabulary": 50}
    with pytest.raises(InputError) as caught:
        encode_rows(rows, tokenizer, data, 4096, "first", **vocabulary)
    said = f"{path}, line 2: 'input_ids' has 50 at number 3; the model's tokens are 0 to 49"
    assert str(caught.value) == f"job 'first': {said}"
    skips = data.model_copy(update={"on_bad_row": "skip"})
    found = encode_rows(rows, tokenizer, skips, 4096, "first", **vocabulary)
    assert (len(found.samples), found.skipped) == (1, [said])
    assert len(encode_rows(rows, tokenizer, data, 4096, "first", target_vocabulary=51).samples) == 2


def test_labels_of_a_csv_file_are_true_and_false(tokenizer: Any, tmp_path: Path) -> None:
    cells = ["q,completion,good", "a,b,True", "a,c,false", "a,d,1"]
    source = DataSource(path=str(write(tmp_path, *cells, name="rows.csv")), columns={"prompt": "q", "label": "good"})
    rows = read_data(source, "first").rows
    assert [row.label for row in rows] == [True, False, "1"]
    how = DataConfig(path=source.path)
    assert [s.desirable for s in encode_rows(rows[:2], tokenizer, how, 4096, "first", trainer="kto").samples] == [
        True,
        False,
    ]
    with pytest.raises(InputError, match=r"line 4: .* with a label of true or false; found label '1'"):
        encode_rows(rows, tokenizer, how, 4096, "first", trainer="kto")


def test_true_and_false_of_a_csv_file_stay_texts_where_they_are_no_labels_of_completions(tmp_path: Path) -> None:
    path = str(write(tmp_path, "question,label", "a,True", "b,false", name="rows.csv"))
    rows = read_data(DataSource(path=path, columns={"prompt": "question", "completion": "label"}), "first").rows
    assert [(row.completion, row.label) for row in rows] == [("True", None), ("false", None)]
    prompts = write(tmp_path, "prompt,label", "a,True", name="prompts.csv")
    assert [value["label"] for _, value in csv.rows(prompts, "first", How())] == ["True"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": []}, "'input_ids' must be a list of at least one"), ({"input_ids": "5"}, "'input_ids' must be a list"),
        ({"input_ids": [1, -1]}, "has -1 at number 2; only whole numbers from 0"),
        ({"input_ids": [1, True]}, "has True at number 2"), ({"input_ids": [1.5]}, "has 1.5 at number 1"),
        ({"input_ids": [2**31]}, "has 2147483648 at number 1"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 numbers, 'input_ids' 2"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "'labels' has 2 where 'input_ids' has 1, at number 1"),
        ({"input_ids": [1, 2], "labels": [-100, -101]}, "'labels' has -101 at number 2; only whole numbers from -100"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no label tokens"), ({"input_ids": [1]}, "no label tokens"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [0, 1]}, "leave the padding out"),
        ({"input_ids": [1, 2], "text": "a"}, "fields of several kinds"),
        ({"conversations": []}, "at least one {from, value}"), ({"conversations": [{"from": "human"}]}, "turn 1 of 'conver"),
        ({"conversations": [{"from": "observation", "value": "a"}]}, "turn 1 is from 'observation'; known are system"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "message 1 (assistant) must be a text, found a number"),
        ({"conversations": SHARED[:1]}, "no message has the role assistant"),
        ({"instruction": "a", "output": None}, "output is null"), ({"instruction": 1, "output": "b"}, "'instruction' must be"),
        ({"instruction": "a", "output": "b", "input": 1}, "'input' must be a text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history', earlier turns, is not read"),
        ({"prompt": PROMPT, "completion": "b"}, "'prompt' must be a text, found a list"),
        ({"prompt": PROMPT, "completion": []}, "'completion' must be a list of at least one"),
        ({"prompt": [{"role": "user"}], "completion": [turn("assistant", "b")]}, "the content of message 1 (user)"),
        ({"prompt": [turn("assistant", "b") | {"weight": 1}], "completion": PROMPT}, "but a prompt is not learnt"),
        ({"prompt": "a", "completion": "b", "system": 3}, "'system' must be a text"),
        ({"text": "a", "system": "b"}, "'system' goes with a prompt or messages"),
    ],
)  # fmt: skip
def test_what_is_no_row_of_its_form_is_refused_with_its_line(
    row: dict[str, Any], said: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path, {"text": "good"}, row)
    assert f"{path}, line 2: " in refusal(tokenizer, path)
    assert said in refusal(tokenizer, path)
    kept = encode(tokenizer, path, on_bad_row="skip")
    assert len(kept.samples) == 1
    assert len(read_data(str(path), "first", on_bad_row="skip").skipped + kept.skipped) == 1


def test_a_message_of_the_system_is_never_dropped_in_silence(tokenizer: Any, tmp_path: Path) -> None:
    assert "data.system goes with prompts and messages" in refusal(
        tokenizer, write(tmp_path, {"text": "a"}), system="s"
    )
    ids = write(tmp_path, {"input_ids": [1, 2]})
    assert "data.system goes with prompts and messages" in refusal(tokenizer, ids, system="s")
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    row = {"prompt": "a", "completion": "b"}
    assert "a message of the system needs a chat template" in refusal(bare, write(tmp_path, row), system="s")
    assert "a message of the system needs a chat template" in refusal(bare, write(tmp_path, row | {"system": "s"}))


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_csv_file_gives_rows_of_its_columns_with_the_line_that_each_begins_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion,note\r\n"a ""b"", c","one\nand two",\r\n\r\n,d,e\r\n')
    rows = read_rows(str(path), "first")
    assert [(row.prompt, row.completion, row.where) for row in rows] == [
        ('a "b", c', "one\nand two", f"{path}, line 2"), ("", "d", f"{path}, line 5"),
    ]  # fmt: skip
    path.write_text("instruction,input,output\nthe fox,,over\nthe dog,lazy,same\n")
    assert [row.prompt for row in read_rows(str(path), "first")] == ["the fox", "the dog\n\nlazy"]


def test_files_of_long_cells_can_be_read_by_turns(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.csv" for name in "ab"]
    for path in paths:
        path.write_text(f"prompt,completion\na,b\nc,{'d' * 200_000}\n")
    first, second = (csv.rows(path, "first", How()) for path in paths)
    assert next(first)[1] == next(second)[1] == {"prompt": "a", "completion": "b"}
    assert [len(value["completion"]) for rows in (first, second) for _, value in rows] == [200_000] * 2


def test_rows_that_are_none_are_left_out_and_counted_where_that_is_asked_for(tokenizer: Any, tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    path = write(tmp_path, good, "{broken", good, {"prompt": "a"}, {"prompt": "a", "completion": ""}, "3", good)
    read = read_data(str(path), "first", on_bad_row="skip")
    encoded = encode_rows(read.rows, tokenizer, DataConfig(path=str(path), on_bad_row="skip"), 4096, "first")
    assert len(encoded.samples) == 3
    skipped = read.skipped + encoded.skipped
    assert [text.split(": ")[0] for text in skipped] == [f"{path}, line {n}" for n in (2, 4, 6, 5)]
    assert "not valid JSON" in skipped[0] and "no label tokens" in skipped[3]
    assert "has no rows: 1 row was left out by on_bad_row, the first: " in refusal(
        tokenizer, write(tmp_path, "{"), on_bad_row="skip"
    )
    empty = write(tmp_path, {"prompt": "a", "completion": ""})
    assert "none of 1 row is a sample" in refusal(tokenizer, empty, on_bad_row="skip")


def test_a_pattern_is_all_files_that_match_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_text(json.dumps([{"text": name}]) if name[0] == "c" else json.dumps({"text": name}))
    (tmp_path / "odd[1].jsonl").write_text('{"text": "odd"}')
    pattern = str(tmp_path / "[ab].*")
    assert [row.text for row in read_rows(pattern, "first")] == ["a.jsonl", "b.jsonl"]
    assert files_of(str(tmp_path / "odd[1].jsonl"), "first") == [str(tmp_path / "odd[1].jsonl")], "a file of that name"
    assert is_there(pattern) and not is_there(str(tmp_path / "x*.jsonl")) and is_there("owner/of-the-hub")
    with pytest.raises(InputError, match=r"no file matches the data path .*x\*\.jsonl"):
        read_rows(str(tmp_path / "x*.jsonl"), "first")


def save_to_disk(folder: Path, *rows: dict[str, Any], files: int = 2, **state: Any) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    for number, name in enumerate(names):
        table = pyarrow.Table.from_pylist(list(rows[number::files]))
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    said = {"_data_files": [{"filename": name} for name in names], "_format_columns": None, "_split": "train"} | state
    (folder / "state.json").write_text(json.dumps(said))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set_is_read_and_of_splits_the_one_to_train_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "completion": f"c{n}", "text": "other"} for n in range(3)]
    plain = save_to_disk(tmp_path / "plain", *rows, _format_columns=["prompt", "completion"])
    found = read_rows(str(plain), "first")
    assert [(row.prompt, row.where) for row in found] == [
        ("p0", f"{plain}, row 1"), ("p2", f"{plain}, row 2"), ("p1", f"{plain}, row 3"),
    ]  # fmt: skip
    save_to_disk(tmp_path / "splits" / "train", {"text": "a"}, files=1)
    save_to_disk(tmp_path / "splits" / "test", {"text": "b"}, files=1)
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [row.text for row in read_rows(str(tmp_path / "splits"), "first")] == ["a"]
    assert [row.text for row in read_rows(str(tmp_path / "splits" / "test"), "first")] == ["b"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": [{"filename": "../data.arrow"}]}, "does not name plain files beside it"),
        ({"_data_files": [{"filename": 3}]}, "does not name plain files"), ({"_data_files": 3}, "not what save_to_disk writes"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "flatten_indices"), ({"_format_columns": ["no"]}, "no"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "cannot read the data set"),
        ({"_data_files": [{"filename": "state.json"}]}, "cannot read the data set"),
    ],
)  # fmt: skip
def test_a_saved_data_set_that_is_damaged_is_refused_by_name(state: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "set", {"text": "a"}, files=1, **state)
    with pytest.raises(InputError) as caught:
        read_rows(str(folder), "first")
    assert str(folder) in str(caught.value) and said in str(caught.value)
    (folder / "state.json").write_text("[")
    with pytest.raises(InputError, match="not valid JSON"):
        read_rows(str(folder), "first")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(InputError, match=r"has no split train \(splits: set\)"):
        read_rows(str(tmp_path), "first")


# --- several sources -------------------------------------------------------------------------------------------------------


def parts(*sizes: int) -> list[Encoded]:
    label = np.array([False, True])
    return [Encoded([Sample(np.array([k, n], np.int32), label) for n in range(size)]) for k, size in enumerate(sizes)]


def counted(weights: list[float | None], sizes: list[int], seed: int = 0) -> list[Counter[int]]:
    """By source, how often each of its samples is taken."""
    paths: list[Any] = [{"path": f"{k}.jsonl", "weight": weight} for k, weight in enumerate(weights)]
    notes: list[str] = []
    taken = [s.ids.tolist() for s in mixture.mixed(parts(*sizes), DataConfig(path=paths), seed, "first", notes).samples]
    assert taken == sorted(taken), "in the order of the sources and their files"
    assert len(notes) == (0 if weights[0] is None else len(sizes))
    return [Counter(n for k, n in taken if k == source) for source in range(len(sizes))]


def test_weights_are_shares_of_the_samples_drawn_alike_every_time() -> None:
    small, large = counted([3, 1], [10, 30])
    assert sum(small.values()) == 30 and set(small.values()) == {3} and len(small) == 10
    assert sum(large.values()) == 10 and set(large.values()) == {1}, "without replacement"
    assert counted([3, 1], [10, 30]) == [small, large]
    assert counted([3, 1], [10, 30], seed=1)[1] != large
    uneven = counted([0.7, 0.2, 0.1], [4, 4, 3])
    assert [sum(one.values()) for one in uneven] == [8, 2, 1], "7.7, 2.2 and 1.1 of 11"
    assert set(counted([2, 1], [4, 5])[0].values()) == {1, 2}, "each once, and some once more"
    with pytest.raises(InputError, match=r"1\.jsonl has the weight 1e-06, which of 8 samples is none"):
        counted([1e6, 1e-6], [4, 4])
