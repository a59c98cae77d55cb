"""What `import packlora` offers: names that are seen, found and fast, and used as the docs say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model

import packlora
from packlora.config import Run
from packlora.errors import InputError
from packlora.run_file import run_from

ROOT = Path(__file__).parents[2]


def python(code: str) -> None:
    """In a process of its own, where nothing of the package is imported yet."""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_shows_the_public_names_without_importing_torch() -> None:
    python(
        "import sys, packlora\n"
        "names = dir(packlora)\n"
        "for name in ('accelerate', 'restore', 'train', 'Run', 'InputError', 'callbacks', '__version__'):\n"
        "    assert name in names, (name, names)\n"
        "assert names == sorted(set(names))\n"
        "assert {name for name in names if not name.startswith('_')} == set(packlora.__all__) - {'__version__'}\n"
        "assert 'torch' not in sys.modules"
    )


def test_every_public_name_is_there_and_others_are_an_error_that_lists_them() -> None:
    assert all(getattr(packlora, name) is not None for name in packlora.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'tarin'; it has InputError, Run, .* train"):
        packlora.tarin  # noqa: B018


def test_every_name_that_the_docs_take_from_the_package_is_found_after_import_packlora_alone() -> None:
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    names = set(re.findall(r"\bpacklora((?:\.[A-Za-z_]+)+)\(", text))
    assert {".accelerate", ".restore", ".train", ".callbacks.ThroughputCallback"} <= names
    for name in names:
        first, *rest = name[1:].split(".")
        found = packlora.__getattr__(first)  # as where nothing was imported yet that binds the name
        for part in rest:
            found = getattr(found, part)
        assert callable(found), name


def test_the_throughput_callback_works_as_the_docs_show(tmp_path: Path) -> None:
    row = torch.arange(3, 15)
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        tiny_model("llama"), settings, train_dataset=[{"input_ids": row, "labels": row}] * 4,
        callbacks=[packlora.callbacks.ThroughputCallback()],
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    assert all(entry["tokens_per_second"] > 0 and entry["peak_memory_gib"] > 0 for entry in logs)


def run_of(base: str, rows: str, folder: Path) -> dict[str, Any]:
    job = {
        "name": "one", "data": {"path": rows}, "adapter": {"r": 2, "target_modules": ["q_proj"]},
        "train": {"global_batch_size": 6},
    }  # fmt: skip
    return {"base_model": base, "output_dir": str(folder / "out"), "device": "cpu", "jobs": [job]}


def test_a_dict_is_a_run(tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path) -> None:
    run = run_of(tiny_base("llama"), write_rows("one"), tmp_path)
    before = repr(run)
    packlora.train(run, overrides=["jobs.one.train.learning_rate=0.5"], max_steps=1)
    assert repr(run) == before, "the caller's dict is not changed"
    assert (tmp_path / "out" / "one" / "adapter_model.safetensors").exists()
    record = (tmp_path / "out" / "run.json").read_text()
    assert '"learning_rate": 0.5' in record


def test_a_dict_is_checked_as_a_run_file_is() -> None:
    run = run_of("base", "rows.jsonl", Path("somewhere"))
    assert isinstance(run_from(run), Run)
    run["jobs"][0]["adapter"]["rnak"] = 3
    with pytest.raises(InputError, match=r"the run:\n  job 'one': adapter.rnak: unknown key; known keys are r, "):
        packlora.train(run)


@pytest.mark.parametrize(("wrong", "kind"), [(3, "int"), (None, "NoneType"), ([{}], "list")])
def test_what_is_no_run_is_refused_by_name(wrong: Any, kind: str) -> None:
    with pytest.raises(InputError, match=f"a run is the path of a run file, a dict or a packlora.Run; got {kind}"):
        packlora.train(wrong)
