"""`packlora preview`: its pieces are those of the samples that training gets, held against TRL's masks, transformers' rendering
and the samples themselves; the base model has config.json and a tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TINY
from PIL import Image as pillow
from terminals import Tty
from test_image_rows import CHAT as IMAGE_CHAT
from test_image_rows import Vision
from test_learnt_as_in_trl import CONVERSATIONS, FILES, headers_of, judged, tokenizer_of
from test_structure import arrows, modules, named
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.commands.preview import Preview
from packlora.data.encode import Sample
from packlora.errors import InputError
from packlora.images.files import Shown
from packlora.run_file import run_from
from packlora.runtime.prepare import prepare

Row = dict[str, Any]


def without_weights(folder: Path, tokenizer: Any, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY | {"model_type": "llama"} | changes))
    return str(folder)


@pytest.fixture
def tree(tmp_path: Path, tokenizer: Any) -> Callable[..., Row]:
    """(rows, keys of the job's data, trainer) -> a run of one job on a base without weights."""
    base = without_weights(tmp_path / "base", tokenizer)

    def make(rows: list[Row], trainer: str = "sft", **data: Any) -> Row:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = {"name": "first", "data": {"path": str(path)} | data, "train": {"trainer": trainer}}
        return {"base_model": base, "output_dir": str(tmp_path / "out"), "device": "cpu", "jobs": [job]}

    return make


def text_of(sample: Preview) -> str:
    return "".join(piece.text for piece in sample.pieces)


def learnt_of(sample: Preview) -> list[str]:
    return [piece.text for piece in sample.pieces if piece.learnt]


def chat(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


# --- against TRL, transformers, and training ---------------------------------------------------------------------------------


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
@pytest.mark.sampled  # every template is in test_learnt_as_in_trl.py, by the encoder
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preview_marks_what_trl_s_masks_mark_and_every_part_of_the_assistant_alone(
    file: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(file.read_text())
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in CONVERSATIONS.values()))
    found = packlora.preview(
        {
            "base_model": without_weights(
                tmp_path / "base", tokenizer, vocab_size=10_000, max_position_embeddings=10**5
            ),
            "output_dir": str(tmp_path / "out"),
            "jobs": [{"name": "first", "data": {"path": str(data), "on_bad_row": "skip", "max_length": 10**5}}],
        }
    )
    by_row, headers = {sample.row: sample for sample in found}, headers_of(file.read_text(), tokenizer)

    def learn(number: int) -> list[str]:
        if number not in by_row:
            raise InputError("it is left out")
        return learnt_of(by_row[number])

    wrong = {
        name: judged(name, turns, file, tokenizer, headers, lambda number=number: learn(number))
        for number, (name, turns) in enumerate(CONVERSATIONS.items(), 1)
    }
    assert not {name: problem for name, problem in wrong.items() if problem}
    assert not (tmp_path / "out").exists()


LETTERS = "süßer 漢字 🙂 e\u0301  x"


def test_a_cut_inside_of_a_letter_keeps_the_letter_and_says_what_was_cut(tree: Any, tokenizer: Any) -> None:
    row, data = {"messages": chat("fox", "漢字")}, {"truncate": "right"}
    (whole,) = packlora.preview(tree([row]))
    before = whole.tokens - whole.labels
    (sample,) = packlora.preview(tree([row], max_length=before + 4, **data))
    assert (sample.tokens, sample.labels, learnt_of(sample)) == (before + 4, 4, ["漢字"])
    assert sample.notes == (f"cut: the sample has {whole.tokens} tokens, over max_length {before + 4}",)


PAIR, JUDGED = {"prompt": "fox", "chosen": "dog", "rejected": "lazy"}, {"prompt": "fox", "completion": "dog"}
KINDS: list[tuple[str, list[Row], Row]] = [
    ("sft", [{"messages": chat("a", LETTERS, "b", "c")}, {"prompt": "a", "completion": "b"}, {"text": "the fox"}], {}),
    ("sft", [{"input_ids": [70, 71, 72, 73, 74], "labels": [-100, 71, -100, 73, -100]}], {}),
    ("sft", [{"prompt": "a", "completion": "b " * 40}, {"prompt": "a", "completion": "b"}],
     {"truncate": "drop", "max_length": 40}),
    ("dpo", [PAIR, PAIR | {"rejected": "lazy dog " * 9}], {"truncate": "right", "max_length": 40}),
    ("orpo", [PAIR], {}),
    ("kto", [JUDGED | {"label": True}, JUDGED | {"label": False}], {}),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "rows", "data"), KINDS)
def test_tokens_labels_and_pieces_are_those_of_the_samples_that_training_gets(
    trainer: str, rows: list[Row], data: Row, tree: Any, tokenizer: Any
) -> None:
    run = tree(rows, trainer, **data)
    samples: list[Sample] = prepare(run_from(run)).jobs[0].encoded.samples
    found = packlora.preview(run)
    assert [(one.tokens, one.labels) for one in found] == [(one.num_tokens, one.num_labels) for one in samples]
    for shown, sample in zip(found, samples, strict=True):
        assert text_of(shown) == tokenizer.decode(sample.ids.tolist())
        ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in learnt_of(shown)]
        assert [one for some in ids for one in some] == sample.ids[sample.is_label].tolist()


def test_rows_that_are_left_out_are_named_with_the_reason_and_only_as_many_as_asked_are_read(tree: Any) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": "b " * 50}, {"text": 5}]
    data = {"on_bad_row": "skip", "truncate": "drop", "max_length": 40}
    (job,) = packlora.commands.preview.previews(tree(rows, **data))
    assert [sample.row for sample in job.samples] == [1]
    bad, other, long = job.left_out
    assert "line 2: found prompt" in bad and "line 4: 'text' must be a text" in other
    assert "line 3: truncate: drop: the sample has" in long and long.endswith("over max_length 40")
    assert len(packlora.preview(tree(rows), rows=1)) == 1  # the next row would be refused
    with pytest.raises(InputError, match="rows: 0; at least 1"):
        packlora.preview(tree(rows), rows=0)


def test_a_stream_is_previewed_as_it_is_read_and_a_file_that_cannot_be_streamed_is_refused(
    tree: Any, tmp_path: Path
) -> None:
    run = tree([JUDGED] * 5, streaming=True, truncate="drop", on_bad_row="skip", max_samples=4)
    run["jobs"][0]["train"]["max_steps"] = 3
    assert [sample.row for sample in packlora.preview(run)] == [1, 2, 3, 4]
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps([JUDGED]))
    run["jobs"][0]["data"]["path"] = str(whole)
    with pytest.raises(InputError, match="is read whole, not row by row"):
        packlora.preview(run)


def test_tokens_of_images_are_named_and_counted(tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (2, 3):
        pillow.new("RGB", (width, 4)).save(tmp_path / f"{width}.png")
    modality = SimpleNamespace(reader=Shown(Vision()), chat_template=IMAGE_CHAT)
    known = SimpleNamespace(modality=lambda path, revision, config: modality)
    monkeypatch.setattr("packlora.commands.preview.plugin", lambda: known)
    blocks = [{"type": "image", "path": "2.png"}, {"type": "text", "text": "and"}, {"type": "image", "path": "3.png"}]
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "fox"}]
    run = tree([{"messages": turns}])
    (sample,) = packlora.preview(run)
    mark = "<|im_start|>"
    assert [(piece.text, piece.images) for piece in sample.pieces] == [
        ("user:", 0), (mark * 2, 2), ("and", 0), (mark * 3, 3), ("<|im_end|>assistant:", 0), ("fox<|im_end|>", 0),
    ]  # fmt: skip
    assert "user:[2 tokens of images]and[3 tokens of images]<|im_end|>" in printed(run, tmp_path)


def test_nothing_that_a_preview_loads_at_once_is_of_peft() -> None:
    at_once, todo, seen = arrows()[0], ["packlora.commands.preview"], set[str]()
    while todo:
        if (one := todo.pop()) not in seen:
            seen.add(one)
            todo += at_once.get(one, ())
    wrong = [one for one in seen for node in modules()[one].body for name in _named(node) if name.startswith("peft")]
    assert "packlora.data.encode" in seen and not wrong


def _named(node: Any) -> list[str]:
    return named(node) if hasattr(node, "names") and not hasattr(node, "value") else []


# --- the command -------------------------------------------------------------------------------------------------------------


def invoke(run: Row, folder: Path, *words: str) -> Any:
    file = folder / "run.yaml"
    file.write_text(json.dumps(run))
    return CliRunner().invoke(app, ["preview", str(file), *words])


def printed(run: Row, folder: Path, *words: str) -> str:
    done = invoke(run, folder, *words)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def test_without_a_terminal_marks_stand_around_what_is_learnt_and_json_is_an_object_a_sample(
    tree: Any, tmp_path: Path
) -> None:
    run = tree([{"messages": chat("the", LETTERS)}] * 5)
    text = printed(run, tmp_path)
    assert text.count(f"<|im_start|>assistant\n⟦{LETTERS}<|im_end|>⟧") == 3 and "\x1b" not in text
    (first, *_), shown = packlora.preview(run, rows=2), printed(run, tmp_path, "--rows", "2", "--json").splitlines()
    assert f"line 1: {first.tokens} tokens, {first.labels} learnt" in text
    assert len(shown) == 2 and json.loads(shown[0]) == {
        "job": "first", "row": 1, "pieces": [{"text": one.text, "learnt": one.learnt} for one in first.pieces],
        "tokens": first.tokens, "labels": first.labels,
    }  # fmt: skip
    assert invoke(tree([{"text": 5}]), tmp_path).exit_code == 2


def test_json_can_be_read_whatever_the_encoding_of_the_output(tree: Any, tmp_path: Path) -> None:
    (line,) = printed(tree([{"prompt": "the", "completion": " \u00e9 \u4e2d"}]), tmp_path, "--json").splitlines()
    assert line.isascii() and "\u00e9 \u4e2d" in "".join(piece["text"] for piece in json.loads(line)["pieces"])


def test_on_a_terminal_what_is_learnt_is_in_colour_and_data_sends_no_sequences(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packlora.commands.preview import print_preview

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = run_from(tree([{"messages": chat("the\x1b[2J", "fox")}]))
    for no_colour in (False, True):
        terminal = Tty()
        monkeypatch.setattr("packlora.commands.preview.standard_output", lambda terminal=terminal: terminal)
        if no_colour:
            monkeypatch.setenv("NO_COLOR", "1")
        print_preview(run, 3, False)
        out = terminal.getvalue()
        assert "\x1b[2J" not in out and "the\\x1b[2J" in out
        assert ("\x1b[30;42mfox<|im_end|>\x1b[0m" in out) is not no_colour and ("⟦fox<|im_end|>⟧" in out) is no_colour
