"""`packlora init`: a run file with comments, from a data file."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from packlora.base.demo_model import DEMO_MODEL, check_place
from packlora.config import DataConfig, TrainConfig
from packlora.config.shared import RESERVED_NAMES
from packlora.config.trainers import built_in, trainers
from packlora.data.formats import endings
from packlora.data.readers import read_data
from packlora.data.rows import Row
from packlora.errors import InputError, plural
from packlora.run_file import load_run

TEXT = """\
# {rows} of {path}: {kind}.
# All keys: docs/run-file.md, or `packlora schema` for an editor. Then:  packlora preview {out}, packlora train {out}
base_model: {base}          # a folder, a Hugging Face model id, or smollm2-135m, the small packaged one
output_dir: {output}        # new or empty
# dtype: bfloat16           # of the base model; where nothing is said so on a GPU, float32 on a CPU
# max_tokens_per_microbatch: auto   # as many as fit; 4096 where nothing is said

jobs:                       # all of them are trained at once, on one base model; copy one to compare settings
  - name: {name}
    data:
      path: {data}
      # eval_split: 0.05            # share that is held out, whose loss is shown; or eval_path: a file of such samples
      # max_length: {length}          # longest sample in tokens
{truncate}    adapter:
      r: 16
      lora_alpha: 32
      # use_dora: true
      # target_modules: [q_proj, v_proj]    # all linear layers where nothing is said
    train:{trainer}
      global_batch_size: {batch}
      num_train_epochs: {epochs}
      learning_rate: {rate}         # docs/settings.md
      lr_scheduler_type: cosine
      warmup_ratio: {warmup}
      # eval_steps: 50              # with eval_split
"""
SAYS_TRUNCATE = "      # truncate: right             # cut longer ones, or drop them; error where nothing is said\n"
DROPS = "      truncate: drop              # some rows look longer; right cuts them, error refuses them\n"
"""Lines on truncate, where all rows are short and where some may be too long."""
COMPLETIONS, PREFERENCES = (TrainConfig.model_fields["global_batch_size"].default, 3, 0.03), (16, 1, 0.1)
"""Samples of a global batch, epochs and share of the warm-up, as docs/settings.md has them."""
LENGTH, CHARACTERS = DataConfig.model_fields["max_length"].default, 3
"""Tokens of the longest sample where nothing is said, and characters of a short token."""
NOBODY = "init"
"""Whom messages about the data name."""


def write_run_file(data: Path, out: Path, base_model: str = "smollm2-135m") -> str:
    """Write a run file that trains one adapter on a data file.

    Args:
        out: the file to write; must not exist.
        base_model: of the run.

    Returns:
        What the rows of the data are, in words.

    Raises:
        InputError: the data cannot be read, `out` exists or cannot be written, or is no run file with these names.
    """
    if os.path.lexists(out):
        raise InputError(f"{out} exists; give another name with -o, or remove it")
    if out.suffix != ".json" and out.suffix in endings():
        raise InputError(f"-o {out}: files that end in {out.suffix} are data; give a run file another ending, as .yaml")
    try:
        rows = read_data(str(data), NOBODY).rows
    except InputError as error:  # there is no job yet
        raise InputError(str(error).removeprefix(f"job {NOBODY!r}: ")) from None
    check_place(base_model)
    _check_rows(rows, base_model)
    kind, name = kind_of(rows[0]), re.sub(r"[^A-Za-z0-9._-]+", "-", data.stem).strip("-.")[:100]
    name = "first" if name.lower() in {"", *RESERVED_NAMES} else name
    seen = os.path.relpath(data, out.parent) if not data.is_absolute() else str(data)

    def quoted(text: str) -> str:
        return text if re.fullmatch(r"[A-Za-z][\w./-]*", text) else json.dumps(text.replace("${", "$${"))

    trainer, page = trainer_of(rows[0]), "preference" if rows[0].targets is None else "your-own-data"
    batch, epochs, warmup = PREFERENCES if built_in()[trainer].rows in ("pairs", "judged") else COMPLETIONS
    text = TEXT.format(
        rows=plural(len(rows), "row"), path=json.dumps(str(data)), kind=kind, out=shlex.quote(str(out)),
        base=quoted(base_model), output=quoted(f"runs/{name}"), name=json.dumps(name), data=quoted(seen),
        truncate=DROPS if max(map(characters, rows)) > CHARACTERS * LENGTH else SAYS_TRUNCATE,
        length=LENGTH, batch=min(len(rows), batch), epochs=epochs, warmup=warmup,
        rate=f"{built_in()[trainer].learning_rate:.0e}".replace("e-0", "e-"),
        trainer=f"\n      trainer: {trainer}              # docs/{page}.md" * (trainer != "sft"),
    )  # fmt: skip
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("x", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from None
    try:
        with file:
            file.write(text)
        load_run(out)
    except BaseException as error:
        out.unlink()
        if isinstance(error, OSError):
            raise InputError(f"cannot write {out}: {error.strerror}") from None
        raise
    return f"{plural(len(rows), 'row')}: {kind}"


def _check_rows(rows: Sequence[Row], base_model: str) -> None:
    """Raises InputError where no one job takes all rows, or the base model cannot see what they hold."""
    wanted = trainer_of(rows[0])
    if built_in()[wanted].rows == "judged" and len(rows) == 1:
        raise InputError(
            f"{rows[0].where}: {kind_of(rows[0])}; {wanted} compares samples with one another and takes at least 2"
        )
    for row in rows:
        if row.completion == "":
            raise InputError(
                f"{row.where}: the completion is empty, so there is nothing to learn from; leave the row out"
            )
        if (found := trainer_of(row)) != wanted:
            raise InputError(
                f"{row.where}: {kind_of(row)}, for trainer {found}, but {rows[0].where}: {kind_of(rows[0])}, for {wanted}; "
                "a job takes one kind of rows: put them in files of their own"
            )
        if base_model == DEMO_MODEL and any(half.files for half in row.pair or (row,)):
            raise InputError(
                f"{row.where}: the row has images, which {DEMO_MODEL} does not see; give a base model that does with "
                "--base-model"
            )


def characters(row: Row) -> int:
    """Characters of the texts of a row, of a pair those of the longer half."""
    if row.pair is not None:
        return max(map(characters, row.pair))
    texts = [row.system, row.prompt, row.completion, row.text]
    return sum(len(text) for text in texts if text) + sum(len(str(one.get("content"))) for one in row.messages or ())


def trainer_of(row: Row) -> str:
    """Trainer that takes rows like this one."""
    if row.targets is not None:
        return trainers(lambda own: own.takes_targets)[0]
    kind = "pairs" if row.pair is not None else "judged" if isinstance(row.label, bool) else "completions"
    return trainers(lambda own: own.rows == kind)[0]


def kind_of(row: Row) -> str:
    """Describe the kind of a row in words."""
    if row.form is not None:
        return row.form
    if row.pair is not None:
        return "pairs of completions, of which the chosen one is preferred"
    if isinstance(row.label, bool):
        return "completions, of which those with the label true are desirable"
    if row.messages is not None:
        return "conversations, of which the assistant's turns are learnt"
    if row.ids is not None:
        return "token ids" + " with soft targets" * (row.targets is not None)
    return "texts, of which everything is learnt" if row.text is not None else "prompts and completions"
