"""What `import packlora` offers: names that are seen, found and fast, and used as the docs say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from conftest import tiny_model

import packlora
from packlora.errors import InputError

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "InputError", "Job", "JobResult", "ProcessError", "Report", "Result", "Run", "Trainer", "WriteError", "accelerate",
    "callbacks", "events", "generate", "merge", "preview", "restore", "train",
}  # fmt: skip


def python(code: str) -> None:
    """In a process of its own, where nothing of the package is imported yet."""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_shows_the_public_names_without_importing_torch() -> None:
    python(
        "import sys, packlora\n"
        "names = dir(packlora)\n"
        "assert names == sorted(set(names))\n"
        "public = {name for name in names if not name.startswith('_')}\n"
        f"assert public == {PUBLIC}, public\n"
        "assert {*packlora.__all__} == public | {'__version__'}\n"
        "assert 'torch' not in sys.modules"
    )


@pytest.mark.parametrize(
    "words",
    [
        "from packlora.callbacks import ThroughputCallback; import packlora",
        "import packlora; packlora.callbacks; from packlora.callbacks import ThroughputCallback",
        "import packlora; from packlora import callbacks; ThroughputCallback = callbacks.ThroughputCallback",
        "import packlora.callbacks; ThroughputCallback = packlora.callbacks.ThroughputCallback",
    ],
)
def test_the_callback_is_found_as_an_attribute_and_as_a_module(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("packlora", "packlora.callbacks"):  # as if they were not imported yet
        monkeypatch.delitem(sys.modules, name, raising=False)
    names: dict[str, Any] = {}
    exec(words, names)
    assert names["packlora"] is not packlora
    assert names["packlora"].callbacks.ThroughputCallback is names["ThroughputCallback"]


def test_every_public_name_is_there_and_others_are_an_error_that_lists_them() -> None:
    assert all(getattr(packlora, name) is not None for name in packlora.__all__)
    with pytest.raises(
        AttributeError,
        match=r"no attribute 'tarin'; it has InputError, Job, JobResult, ProcessError, Report, Result, Run, Trainer, .* train",
    ):
        packlora.tarin  # noqa: B018


def test_every_name_that_the_docs_take_from_the_package_is_found_after_import_packlora_alone() -> None:
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    names = set(re.findall(r"\bpacklora((?:\.[A-Za-z_]+)+)\(", text))
    assert {".accelerate", ".restore", ".train", ".Trainer", ".Job", ".generate", ".events.ThroughputCallback"} <= names
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


@pytest.mark.parametrize(("wrong", "kind"), [(3, "int"), (None, "NoneType"), ([{}], "list")])
def test_what_is_no_run_is_refused_by_name(wrong: Any, kind: str) -> None:
    with pytest.raises(InputError, match=f"a run is the path of a run file, a dict or a packlora.Run; got {kind}"):
        packlora.train(wrong)


# --- what `help` says --------------------------------------------------------------------------------------------------


def public_classes() -> list[type]:
    """Exported classes, and those of the package that their fields hold: a Run's jobs, a Result's."""
    out: list[type] = []
    todo = [value for value in (getattr(packlora, name) for name in PUBLIC) if isinstance(value, type)]
    todo.append(packlora.callbacks.ThroughputCallback)
    while todo:
        one = todo.pop(0)
        if one not in out:
            out.append(one)
            held = [kind for name in public_fields(one) for kind in _kinds(get_type_hints(one)[name])]
            todo += [kind for kind in held if kind.__module__.startswith("packlora.")]
    return sorted(out, key=lambda one: one.__name__)


def public_fields(one: type) -> list[str]:
    """Those that a class declares itself, but for what repr hides."""
    if dataclasses.is_dataclass(one):
        return [field.name for field in dataclasses.fields(one) if field.repr]
    return [name for name in inspect.get_annotations(one) if not name.startswith("_") and name != "model_config"]


def _kinds(hint: Any) -> list[type]:
    parts = get_args(hint)
    return [kind for part in parts for kind in _kinds(part)] if parts else [hint] if isinstance(hint, type) else []


def test_all_that_a_run_and_a_result_hold_is_public() -> None:
    names = {one.__name__ for one in public_classes()}
    assert {"JobConfig", "TrainConfig", "AdapterConfig", "DataConfig", "ScheduleConfig", "JobResult"} <= names


@pytest.mark.parametrize("one", public_classes(), ids=lambda one: one.__name__)
def test_a_public_class_its_fields_and_its_methods_say_what_they_are(one: type) -> None:
    assert one.__doc__ and not one.__doc__.startswith(f"{one.__name__}("), "what dataclasses write is no docstring"
    body = next(
        node.body for node in ast.walk(ast.parse(Path(inspect.getfile(one)).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == one.__name__
    )  # fmt: skip
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
    explained = {
        node.target.id for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }  # fmt: skip
    silent = [name for name in public_fields(one) if name not in explained | set(re.findall(r"\w+", one.__doc__))]
    assert not silent


def test_help_of_the_package_names_what_is_public() -> None:
    text = pydoc.render_doc(packlora, renderer=pydoc.plaintext)
    assert packlora.__doc__.strip().splitlines()[0] in text
    assert all(re.search(rf"\b{name}\b", text) for name in PUBLIC)


# --- what a type checker says ------------------------------------------------------------------------------------------


def test_a_typed_file_uses_every_public_name() -> None:
    text = (ROOT / "tests" / "typed_user.py").read_text()
    assert (ROOT / "packlora" / "py.typed").exists()
    assert all(re.search(rf"\b{name}\b", text) for name in PUBLIC)
