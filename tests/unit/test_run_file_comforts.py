"""What a run file may say once for all jobs, and what it may take from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packlora.config import Run
from packlora.errors import InputError
from packlora.run_file import load_run, run_from

TREE: dict[str, Any] = {"base_model": "m", "output_dir": "o"}


def made(*jobs: dict[str, Any], **top: Any) -> Run:
    return run_from(
        {**TREE, "jobs": [{"name": f"j{n}", "data": {"path": "d.jsonl"}, **job} for n, job in enumerate(jobs)], **top}
    )


def refusal(*jobs: dict[str, Any], **top: Any) -> str:
    with pytest.raises(InputError) as caught:
        made(*jobs, **top)
    return str(caught.value)


# --- defaults and x- -------------------------------------------------------------------------------------------------------


def test_defaults_hold_where_a_job_says_nothing_key_by_key() -> None:
    defaults = {
        "seed": 7, "train": {"learning_rate": 0.5, "max_steps": 3}, "adapter": {"r": 3, "rank_pattern": {"q_proj": 2}},
        "data": {"max_length": 99},
    }  # fmt: skip
    one, two = made(
        {}, {"seed": 8, "train": {"max_steps": 5}, "adapter": {"rank_pattern": {"v_proj": 4}}}, defaults=defaults
    ).jobs
    assert (one.seed, one.train.learning_rate, one.train.max_steps, one.adapter.r, one.data.max_length) == (
        7,
        0.5,
        3,
        3,
        99,
    )
    assert (two.seed, two.train.learning_rate, two.train.max_steps, two.adapter.r, two.data.max_length) == (
        8,
        0.5,
        5,
        3,
        99,
    )
    assert (one.adapter.rank_pattern, two.adapter.rank_pattern) == ({"q_proj": 2}, {"v_proj": 4}), "a value as a whole"
    assert defaults["train"] == {"learning_rate": 0.5, "max_steps": 3}, "what was given is not changed"
    assert made({}, defaults={}).model_dump() == made({}).model_dump()


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ([], "defaults: input should be a mapping of keys of a job; found a list"), (None, "found nothing"),
        ("x", "found a text"), ({"name": "a"}, "defaults: has a name"), ({"trian": {}}, "job 'j0': trian: unknown key"),
        ({"train": {"learningrate": 1}}, "did you mean 'learning_rate'?"), ({"train": 3}, "train: input should be a mapping"),
    ],
)  # fmt: skip
def test_defaults_that_cannot_be_are_refused(defaults: Any, said: str) -> None:
    assert said in refusal({}, defaults=defaults)


def test_keys_that_begin_with_x_are_nobody_s_at_the_top_alone() -> None:
    assert made({}, **{"x-anything": {"a": [1, "${NOT_SET}"]}, "x-": None}).model_dump() == made({}).model_dump()
    assert "job 'j0': x-a: unknown key" in refusal({"x-a": 1})
    assert "xa: unknown key" in refusal({}, xa=1)


def test_an_override_of_one_job_leaves_others_alone_that_share_its_mapping_by_an_anchor(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "base_model: m\noutput_dir: o\nx-t: &t {max_steps: 1}\n"
        "jobs: [{name: a, data: &d {path: a.jsonl}, train: *t}, {name: b, data: *d, train: *t}]\n"
    )
    run = load_run(tmp_path / "run.yaml", ["jobs.a.train.max_steps=3", "jobs.b.data.max_samples=5"])
    assert [(job.train.max_steps, job.data.max_samples) for job in run.jobs] == [(3, None), (1, 5)]


# --- the environment ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("${WHERE}/out", "/data/out"), ("a-${WHERE:-b}", "a-/data"), ("${UNSET:-here}/o", "here/o"), ("${EMPTY:-here}", "here"),
        ("${UNSET:-}x", "x"), ("$${WHERE}", "${WHERE}"), ("$WHERE", "$WHERE"), ("${WHERE}${WHERE}", "/data/data"),
        ("cost$", "cost$"), ("${UNSET:-a:-b}", "a:-b"), ("${NESTED}", "${WHERE}"),
    ],
)  # fmt: skip
def test_a_reference_becomes_what_the_environment_says(text: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("NESTED", "${WHERE}")  # what a variable holds is not looked through again
    monkeypatch.delenv("UNSET", raising=False)
    assert made({}, output_dir=text).output_dir == found


def test_a_number_may_come_from_the_environment_and_everything_else_is_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEED": "12", "RATE": "1e-3", "YES": "true", "NAME": "null", "DIR": "[a]"}.items():
        monkeypatch.setenv(name, value)
    run = made(
        {"name": "${NAME}", "seed": "${SEED}", "train": {"learning_rate": "${RATE}", "max_steps": "${NO_SUCH:-4}"}},
        gradient_checkpointing="${YES}", output_dir="${DIR}",
    )  # fmt: skip
    (job,) = run.jobs
    assert (job.name, job.seed, job.train.learning_rate, job.train.max_steps) == ("null", 12, 1e-3, 4)
    assert run.gradient_checkpointing is True and run.output_dir == "[a]"
    assert "seed: input should be a valid integer; found '12 '" in refusal({"seed": "${SEED} "})


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"data": {"path": "${NO_SUCH}/a"}}, "jobs[0].data.path: the environment variable NO_SUCH is not set; write ${N"),
        ({"adapter": {"target_modules": ["q", "${NO_SUCH}"]}}, "jobs[0].adapter.target_modules[1]: the environment variable"),
        ({"data": {"path": "${}"}}, "has '${' in '${}'; write ${NAME}"), ({"data": {"path": "${a b}"}}, "has '${' in"),
        ({"data": {"path": "${NO_SUCH"}}, "has '${' in"), ({"data": {"path": "${NO_SUCH-a}"}}, "has '${' in"),
    ],
)  # fmt: skip
def test_a_reference_to_nothing_is_refused_with_its_key(
    job: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    assert said in refusal(job)


def test_references_in_keys_are_texts() -> None:
    assert "${A}: unknown key" in refusal({}, **{"${A}": 1})


# --- paths -------------------------------------------------------------------------------------------------------------------


def test_every_path_of_a_list_and_every_pattern_is_looked_up_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "run" / name).touch()
    file = tmp_path / "run" / "run.yaml"
    file.write_text(
        "base_model: m\noutput_dir: o\njobs:\n- name: a\n"
        "  data: {path: [{path: a.jsonl, weight: 1}, {path: '[b].jsonl', weight: 2}], eval_path: [b.jsonl, 'x*.jsonl']}\n"
    )
    (job,) = load_run(file).jobs
    beside = str(tmp_path / "run")
    assert job.data.sources == [(f"{beside}/a.jsonl", 1.0), (f"{beside}/[b].jsonl", 2.0)]
    assert job.data.eval_paths == [f"{beside}/b.jsonl", "x*.jsonl"]
    assert Run.model_validate_json(load_run(file).model_dump_json()).jobs[0].data == job.data
