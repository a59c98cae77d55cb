"""Sweeps: a candidate is the job that it would be alone, the rules end the right ones, and a run that is broken off makes the
same decisions."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seeds import SOAK
from test_members import InThreads, at_window, base, job, losses
from test_preference import judged, pairs
from test_training import adapter, distance
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.commands.adapter_folder import trained_by
from packlora.commands.control import clone_job, stop_job
from packlora.config import Run
from packlora.events import Event, JobDone, JobJoined, MicrobatchDone, Note, Stepped, Stop
from packlora.runtime.prepare import prepare
from packlora.sweep.candidates import Sweep, begun
from packlora.sweep.changes import Change
from packlora.sweep.page import ranked_table

assert callable(base)  # a fixture
Tree = Callable[..., dict[str, Any]]


@pytest.fixture
def tree(base: str, tmp_path: Path) -> Tree:
    def make(**sweep: Any) -> dict[str, Any]:
        template = job("a", tmp_path, rows=16)  # 8 steps
        template["adapter"] = {"r": 3, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}
        return {
            "base_model": base, "device": "cpu", "dtype": "float32", "max_tokens_per_microbatch": 60, "save_every": 3,
            "eval_every": 2, "save_total_limit": None, "output_dir": str(tmp_path / "out"), "jobs": [template],
            "sweep": {
                "job": "a", "parameters": {"train.learning_rate": [1e-4, 3e-2, 1e30, 1e-2], "adapter.r": [2, 5]},
                "concurrent": 3, "stopping": {"method": "successive_halving", "min_resource": 2, "reduction_factor": 2},
            } | sweep,
        }  # fmt: skip

    return make


def ranking(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def test_candidates_are_the_jobs_that_they_would_be_alone_and_the_best_one_is_kept(tree: Tree, tmp_path: Path) -> None:
    run, out, heard = tree(), tmp_path / "out", list[Event]()
    run["jobs"][0]["train"]["weight_decay"] = (
        0.1  # with a rate of 1e30 A grows too: nothing is finite, on any processor
    )
    result = packlora.train(run, subscribers=[heard.append])
    found = ranking(out)
    assert (result.status, found["status"], len(found["candidates"])) == ("done", "done", 8)
    names = [f"a-{number:03d}" for number in range(8)]
    assert sorted(result.jobs) == names and not (out / "a").exists()
    for name in names if SOAK else names[1:5]:  # a run of the one job, with its values written out
        own = next(line for line in found["candidates"] if line["name"] == name)
        alone = json.loads(json.dumps(run["jobs"][0])) | {"name": name}
        alone["train"]["learning_rate"] = own["parameters"]["train.learning_rate"]
        alone["adapter"]["r"] = own["parameters"]["adapter.r"]
        folder = tmp_path / f"alone-{name}"
        by_itself = {key: value for key, value in run.items() if key != "sweep"}
        steps = {"max_steps": own["step"]} if own["step"] else {}
        packlora.train({**by_itself, "jobs": [alone], "output_dir": str(folder), "save_every": 0}, **steps)
        if alone["train"]["learning_rate"] == 1e30:
            assert own["status"] == "failed" and own["eval_loss"] is None
            continue
        assert distance(adapter(out, name), adapter(folder, name)) < 1e-5
        for ours, theirs in zip(losses(out, name), losses(folder, name), strict=True):
            assert ours[::2] == theirs[::2] and abs(ours[1] - theirs[1]) < 1e-5
    values = [line["eval_loss"] for line in found["candidates"] if line["eval_loss"] is not None]
    assert values == sorted(values) and len(values) == 6
    best = out / "best" / "adapter_model.safetensors"
    assert best.read_bytes() == (out / found["best"] / "adapter_model.safetensors").read_bytes()
    for folder in (out / "best", out / found["best"]):  # what asks it knows how it was trained
        told = trained_by(folder)
        assert told is not None and told.job.name == found["best"]
    stopped = [line for line in found["candidates"] if line["status"] == "stopped"]
    assert stopped and all(line["reason"].startswith("successive halving") for line in stopped)
    assert {event.job for event in heard if isinstance(event, JobDone) and event.stopped} == {
        own["name"] for own in stopped
    }
    assert {event.job for event in heard if isinstance(event, JobJoined)} == set(names[3:])
    most = max(len(event.batches) for event in heard if isinstance(event, MicrobatchDone))
    assert 1 < most <= 3
    page = (out / "report.html").read_text()
    assert "Sweep" in page and "train.learning_rate" in page and "a-001" in page


def test_candidates_that_share_every_microbatch_shape_have_the_bits_of_the_job_alone(
    tree: Tree, tmp_path: Path
) -> None:
    run = tree(parameters={"train.learning_rate": [1e-3, 1e-2]}, concurrent=2, stopping={"method": "none"})
    run["schedule"] = {"method": "solo"}  # each candidate's own microbatches: nothing else differs from the job alone
    packlora.train(run)
    for name, rate in (("a-000", 1e-3), ("a-001", 1e-2)):
        alone = json.loads(json.dumps(run["jobs"][0])) | {"name": name}
        alone["train"]["learning_rate"] = rate
        by_itself = {key: value for key, value in run.items() if key != "sweep"}
        packlora.train({**by_itself, "jobs": [alone], "output_dir": str(tmp_path / name)})
        file = Path(name, "adapter_model.safetensors")
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / name / file).read_bytes()
        assert losses(tmp_path / "out", name) == losses(tmp_path / name, name)


def test_a_sweep_stopped_between_the_last_step_of_a_rung_and_its_decision_decides_when_it_is_resumed(
    tree: Tree, tmp_path: Path
) -> None:
    """A pattern of plans may be for the layers of later candidates alone."""
    parameters = {"adapter.target_modules": [["q_proj"], ["down_proj"]], "train.learning_rate": [1e-4, 3e-2]}
    run = tree(parameters=parameters, concurrent=2) | {"plans": {"plan": {"down_proj": "base-added"}}}
    steps: list[Event] = []

    def stopping(event: Event) -> Any:
        steps.extend([event] if isinstance(event, Stepped) else [])
        return Stop() if isinstance(event, Stepped) and len(steps) == 4 else None

    packlora.train({**run, "output_dir": str(tmp_path / "whole")})
    assert packlora.train(run, subscribers=[stopping]).status == "interrupted"
    packlora.train(run, resume=True)
    ours, theirs = (json.loads((tmp_path / name / "run.json").read_text())["changes"] for name in ("out", "whole"))
    assert ours == theirs and ours[2]["round"] == 2
    assert ranking(tmp_path / "out") == ranking(tmp_path / "whole")


@pytest.mark.parametrize("method", [pytest.param("grid", marks=pytest.mark.soak), "optuna"])
def test_a_sweep_has_the_same_ranking_and_bits_wherever_it_is_broken_off_and_resumed(
    method: str, tree: Tree, tmp_path: Path
) -> None:
    pytest.importorskip("optuna") if method == "optuna" else None
    run = tree()
    if method == "optuna":
        ranges = {"train.learning_rate": {"min": 1e-4, "max": 0.1, "log": True}, "adapter.r": [2, 5]}
        run = tree(parameters=ranges, method="optuna", num_trials=7, concurrent=4)
    whole, events = tmp_path / "whole", list[Event]()
    packlora.train({**run, "output_dir": str(whole)}, subscribers=[events.append])
    want = ranking(whole)
    places = (
        range(12, len(events), 7)
        if SOAK
        else [len(events) * part // 20 for part in ((12,) if method == "optuna" else (9, 18))]
    )
    for number, at in enumerate(places):
        out, count = tmp_path / f"out-{number}", [0]

        def break_off(event: Event, count: list[int] = count, at: int = at) -> None:
            count[0] += 1
            if count[0] == at:
                signal.default_int_handler(signal.SIGINT, None)

        with pytest.raises(KeyboardInterrupt):
            packlora.train({**run, "output_dir": str(out)}, subscribers=[break_off])
        packlora.train({**run, "output_dir": str(out)}, resume=True)
        assert ranking(out) == want, at
        assert (
            json.loads((out / "run.json").read_text())["changes"]
            == json.loads((whole / "run.json").read_text())["changes"]
        )
        for line in want["candidates"]:
            file = Path(line["name"], "adapter_model.safetensors")
            assert (out / file).read_bytes() == (whole / file).read_bytes(), (at, line["name"])
    assert packlora.train({**run, "output_dir": str(out)}, resume=True).tokens == 0  # nothing is left to be done
    assert ranking(out) == want


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "max_steps", 9), ("train", "eval_steps", 3), (None, "seed", 8), ("train", "num_train_epochs", 2),
        ("data", "path", "elsewhere.jsonl"), ("data", "eval_path", "elsewhere.jsonl"),
    ],
)  # fmt: skip
def test_a_resumed_sweep_keeps_the_job_that_its_candidates_are_made_from(
    section: str | None, key: str, value: Any, tree: Tree
) -> None:
    """Candidates that are yet to come would have other steps, seeds or samples than those that they are compared with."""
    run = tree(parameters={"adapter.r": [2, 3]}, concurrent=1, stopping={"method": "none"})
    run["jobs"][0]["train"]["max_steps"] = 2
    first = packlora.train(run, subscribers=[lambda event: Stop() if isinstance(event, Stepped) else None])
    assert first.status == "interrupted"
    template = run["jobs"][0]
    (template if section is None else template[section])[key] = value
    name = key if section is None else f"{section}.{key}"
    with pytest.raises(packlora.InputError, match=f"job 'a' {name} changed"):
        packlora.train(run, resume=True)


def decided(
    rule: dict[str, Any], curves: list[list[float]], metric: str = "eval_loss", told: list[str] | None = None
) -> list[tuple[str, int]]:
    """Which candidates with these values of the metric, every second step, leave in which round."""
    train = {"max_steps": 2 * len(curves[0]), "trainer": "sft" if metric == "eval_loss" else "dpo"}
    template = {"name": "a", "data": {"path": "x", "eval_path": "y"}, "train": train}
    sweep = Sweep(
        Run.model_validate(
            {
                "base_model": "-", "output_dir": "-", "eval_every": 2, "jobs": [template],
                "sweep": {"job": "a", "parameters": {"seed": list(range(len(curves)))}, "stopping": rule, "metric": metric},
            }
        )
    )  # fmt: skip
    changes, out = sweep.begin(), []
    sweep.follow(changes)
    for given in range(2, 2 * len(curves[0]) + 2, 2):
        for trial, curve in zip(sweep.trials.values(), curves, strict=True):
            if not trial.has_left:
                history = [{"step": 2 * at + 2, "eval_loss": 0.0, metric: curve[at]} for at in range(given // 2)]
                trial.see(given, "running", 2 * len(curve), history)
        for name, reason in sweep.decide(given).items():
            out += [(name, given)] if reason else []
            (told if told is not None else []).append(reason)
            sweep.follow([Change(round=given, by="sweep", leave=name, step=given, reason=reason)])
    return out


def test_each_rule_ends_the_candidates_that_it_should() -> None:
    falling = [[4 - 0.1 * speed * step for step in range(8)] for speed in range(4)]
    rule: dict[str, Any] = {"method": "successive_halving", "min_resource": 4, "reduction_factor": 2}
    assert decided(rule, falling) == [("a-000", 4), ("a-001", 4), ("a-002", 8)]
    rule = {"method": "median", "n_startup_trials": 4, "n_warmup_steps": 4}
    assert decided(rule, falling) == [("a-000", 6), ("a-001", 6), ("a-000", 6), ("a-001", 6)][:2]
    up = [[3.0, 2.0, 2.1, 1.9, 2.0, 2.0, 2.0, 1.0], [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3]]
    assert decided({"method": "patience", "patience": 3, "min_delta": 0.05}, up) == [("a-000", 14)]
    assert decided({"method": "target", "target": 2.75}, up) == [("a-000", 4), ("a-001", 4)]
    assert decided({"method": "none"}, up) == []


def test_of_rewards_the_higher_are_the_better() -> None:
    """With the other sign of a curve, and of a target, the decisions are those of a loss."""
    curves = [
        [3.0, 2.0, 2.1, 1.9, 2.0, 2.0, 2.0, 1.0],
        *([4 - 0.1 * speed * step for step in range(8)] for speed in range(4)),
    ]
    rules: list[dict[str, Any]] = [
        {"method": "successive_halving", "min_resource": 4, "reduction_factor": 2},
        {"method": "median", "n_startup_trials": 4}, {"method": "patience", "patience": 2, "min_delta": 0.05},
    ]  # fmt: skip
    rewards, said = [[-value for value in curve] for curve in curves], list[str]()
    for rule in rules:
        assert decided(rule, rewards, "eval_rewards/margins", said) == decided(rule, curves) != []
    above = decided({"method": "target", "target": -2.75}, rewards, "eval_rewards/accuracies", said)
    assert above == decided({"method": "target", "target": 2.75}, curves) != []
    words = ("margins -4.0000 at step 4, where one in 2 goes on, down to", "the median is -", "margins over -", "-2.75")
    assert [word for word in words if not any(word in reason for reason in said)] == []


def test_candidates_are_ranked_by_their_held_out_margins(tree: Tree, tmp_path: Path) -> None:
    rules = {"method": "successive_halving", "min_resource": 2, "reduction_factor": 2}
    run = tree(parameters={"train.learning_rate": [1e-4, 1e-2, 1e-3]}, metric="rewards/margins", stopping=rules)
    run["jobs"][0] |= {
        "data": {"path": pairs(tmp_path / "pairs.jsonl"), "eval_path": pairs(tmp_path / "held.jsonl", 5, 1)},
        "train": {"trainer": "dpo", "max_steps": 4, "global_batch_size": 4},
    }
    assert packlora.train({**run, "max_tokens_per_microbatch": 256}).status == "done"
    out, metric = tmp_path / "out", "eval_rewards/margins"
    found = ranking(out)
    assert found["metric"] == metric and found["best"] == found["candidates"][0]["name"]
    for line in found["candidates"]:
        state = json.loads((out / line["name"] / "trainer_state.json").read_text())
        evals = [[own["step"], own[metric]] for own in state["log_history"] if metric in own]
        assert line["evals"] == evals and line[metric] == evals[-1][1]
    values = [line[metric] for line in found["candidates"]]
    assert values == sorted(values, reverse=True) and len(set(values)) == 3
    stopped = [line for line in found["candidates"] if line["status"] == "stopped"]
    assert stopped and all("held-out rewards/margins" in line["reason"] for line in stopped)
    page, shown = (out / "report.html").read_text(), ranked_table(out)
    assert "Held-out rewards/margins" in page and "the best held-out rewards/margins" in page
    assert shown is not None and "held-out rewards/margins" in [column.header for column in shown.columns]


def test_a_metric_that_a_candidate_has_not_is_refused_by_name(tree: Tree, tmp_path: Path) -> None:
    by_rate = {"train.learning_rate": [1e-4, 1e-3]}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"parameters": by_rate}, r"eval_rewards/margins is of trainer dpo, orpo, kto; with .* the trainer is sft"),
        ({"trainer": "dpo"}, {"parameters": {"train.trainer": ["dpo", "sft"]}}, "'train.trainer': 'sft'} the trainer is sft"),
        ({"trainer": "kto"}, {"parameters": by_rate, "metric": "eval_rewards/accuracies"}, "is of trainer dpo, orpo; with"),
        ({"trainer": "kto"}, {"parameters": by_rate}, "compares desirable with undesirable completions; .* are all desirable"),
        ({"trainer": "dpo"}, {"metric": "rewards/chosen"}, "'eval_loss', 'eval_rewards/accuracies', .* or 'reward'; found"),
    ]  # fmt: skip
    held = tmp_path / "held.jsonl"
    held.write_text(2 * (json.dumps({"prompt": "a", "completion": "b c", "label": True}) + "\n"))
    for train, sweep, message in cases:
        run = tree(**{"metric": "eval_rewards/margins", **sweep})
        run["jobs"][0]["train"] |= train
        if train.get("trainer") == "kto":
            run["jobs"][0]["data"] = {"path": judged(tmp_path / "said.jsonl"), "eval_path": str(held)}
        with pytest.raises(packlora.InputError, match=message):
            packlora.train(run)
    with pytest.raises(packlora.InputError, match=r"target is -1; a held-out loss is above 0"):
        packlora.train(tree(stopping={"method": "target", "target": -1.0}))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_swept_is_refused_before_training(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"job": "b"}, "there is no job 'b'; there are a"),
        ({"parameters": {"train.rate": [1, 2]}}, r"sweep:\n.*train.rate: unknown key"),
        ({"parameters": {"adapter.r": [8, 0]}}, "adapter.r: input should be greater"),
        ({"parameters": {"adapter.r": {"min": 1, "max": 8}}}, "adapter.r is a range, and a grid takes lists"),
        ({"parameters": {"adapter.r": {"min": 8, "max": 1}}, "method": "random", "num_trials": 2}, "goes from 8 to 1"),
        ({"method": "random"}, "method random needs num_trials"),
        ({"num_trials": 3}, "num_trials is 3, but the method is grid"),
        ({"parameters": {}}, "parameters is empty; give values of at least one key"),
        ({"stopping": {"method": "target"}}, "method: target goes with a target"),
        ({"parameters": {"name": ["b"]}}, "name cannot be swept"),
        (
            {"parameters": {"adapter.r": {"mim": 1, "max": 2}}},
            r"sweep\.parameters\.adapter\.r\.mim: .*did you mean 'min'",
        ),
        ({"parameters": {"adapter.r": 3}}, "adapter.r: input should be a list of values, or a range"),
        ({"concurent": 3}, "did you mean 'concurrent'"),
        (
            {"parameters": {"adapter.target_modules": [["q_proj"], ["k_proj"], ["nope"]]}, "concurrent": 1},
            r"job 'a-002': target_modules \['nope'\] matches nothing",
        ),
        (
            {"parameters": {"data.max_length": [50, 3]}, "concurrent": 1, "method": "optuna", "num_trials": 1},
            "job 'a-00[01]': .* over max_length 3",
        ),
        *(
            (
                {"parameters": {key: {"min": low, "max": high}}, "method": "random", "num_trials": 2},
                f"{key}: input should",
            )
            for key, low, high in (("train.max_steps", 1, 10**400), ("train.learning_rate", -1e308, 1e308))
        ),
    ]
    for sweep, message in cases:
        with pytest.raises(packlora.InputError, match=message):
            packlora.train(tree(**sweep))
    run = tree(concurrent=1)
    named = {**run, "jobs": [*run["jobs"], run["jobs"][0] | {"name": "A-007"}]}
    with pytest.raises(packlora.InputError, match="sweep: job 'A-007' has the name of a candidate of 'a'"):
        packlora.train(named)
    with pytest.raises(packlora.InputError, match="eval_every is 0"):
        packlora.train({**run, "eval_every": 0})
    with pytest.raises(packlora.InputError, match="max-steps would end"):
        packlora.train(run, max_steps=2)
    template = run["jobs"][0]
    short = template | {"train": template["train"] | {"max_steps": 4}}
    with pytest.raises(packlora.InputError, match="compared every 9 optimizer steps and take 4, so none"):
        packlora.train({**run, "jobs": [short], "eval_every": 9})
    for steps in (0, 3):  # candidates would never or seldom be evaluated where they are compared
        run["jobs"][0]["train"]["eval_steps"] = steps
        with pytest.raises(packlora.InputError, match=f"eval_every, 2, where train.eval_steps {steps} of job 'a'"):
            packlora.train(run)
    del run["jobs"][0]["data"]["eval_path"]
    with pytest.raises(packlora.InputError, match=r"has no data\.eval_path"):
        packlora.train(run)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(packlora.InputError, match=r"pip install 'packlora\[sweep\]'"):
        packlora.train(tree(method="optuna", num_trials=2))
    assert not (tmp_path / "out").exists()


def test_what_would_take_a_later_candidates_place_is_refused_and_one_that_cannot_be_ends_no_run(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "unlike", lambda sweep: [])  # as if what a candidate needs had gone since
    targets = {"adapter.target_modules": [["q_proj"], ["k_proj"], ["nope"], ["v_proj"]]}
    run, out = tree(parameters=targets, concurrent=1, stopping={"method": "none"}), tmp_path / "out"
    run["jobs"][0]["train"]["max_steps"] = 2
    asking, notes = InThreads(out), list[str]()

    def heard(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    def ask() -> None:
        asking.call("clone", clone_job, "a-000", "a-003", [])
        asking.call("stop", stop_job, "a")
        asking.call("weights", clone_job, "a", "b", [], True)

    assert packlora.train(run, subscribers=[at_window(0, ask), heard]).status == "done"
    asking.join()
    assert "job 'a-003' has the name of a candidate of 'a'" in asking.answers["clone"]
    for asked in ("stop", "weights"):
        assert "job 'a' is not trained itself; its candidates are: a-000" in asking.answers[asked]
    assert any("the sweep has no more candidates: job 'a-002': target_modules ['nope']" in note for note in notes)
    assert [line["status"] for line in ranking(out)["candidates"]] == ["done", "done"] and (out / "best").is_dir()


def test_a_grid_is_counted_before_anything_is_made_of_it_and_has_no_list(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any) -> None:
        raise AssertionError("the grid is made")

    monkeypatch.setattr("itertools.product", made)
    rates = [1e-6 * number for number in range(1, 1001)]
    for keys, told in ((3, "1,000,000,000"), (7, "1,000,000,000,000,000,000,000"), (2, "1,000,000")):
        names = (
            "train.learning_rate",
            "train.weight_decay",
            "adapter.lora_alpha",
            "data.max_length",
            "seed",
            "adapter.r",
        )
        parameters = dict.fromkeys([*names, "train.warmup_steps"][:keys], rates)
        with pytest.raises(packlora.InputError, match=f"has {told} combinations, and at most 100,000 are taken; leave"):
            packlora.train(tree(parameters=parameters))
    run = tree(parameters={"seed": list(range(50)), "adapter.r": list(range(1, 41)), "adapter.lora_alpha": [1, 2, 3]})
    sweep = Sweep(Run.model_validate(run))
    assert sweep.total == 6000
    drawn = [tuple(sweep.drawn(number).values()) for number in (0, 1, 2, 3, 119, 120, 5999)]
    assert drawn == [(0, 1, 1), (0, 1, 2), (0, 1, 3), (0, 2, 1), (0, 40, 3), (1, 1, 1), (49, 40, 3)]


def test_two_candidates_that_would_be_the_same_job_are_refused(tree: Tree) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"adapter.r": [8, 16, 8]}, r"parameters\.adapter\.r: 8 is the same as 8; leave one of them out"),
        ({"train.learning_rate": [1e-4, 0.0001]}, r"train\.learning_rate: 0\.0001 is the same as 0\.0001"),
        ({"train.learning_rate": [1, 1.0]}, r"train\.learning_rate: 1\.0 is the same as 1;"),
        ({"adapter.target_modules": [["q_proj"], ["q_proj"]]}, r"target_modules: \['q_proj'\] is the same as"),
        (
            {"train": [{"learning_rate": 1e-4}, {"learning_rate": 1e-3}], "train.learning_rate": [1e-4, 1e-3]},
            r"sweep: candidates 0 and 2 are the same job: .*'train\.learning_rate': 0\.0001\}",
        ),
    ]
    for parameters, message in cases:
        with pytest.raises(packlora.InputError, match=message):
            packlora.train(tree(parameters=parameters))


def test_a_rule_that_can_end_no_candidate_is_told(tree: Tree) -> None:
    told: list[tuple[dict[str, Any], str | None]] = [  # 8 steps, an evaluation every 2, 8 candidates
        ({"method": "successive_halving"}, "looks at step 16 first, and candidates take at most 8 optimizer steps"),
        ({"method": "successive_halving", "min_resource": 7}, "looks at step 8 first"),
        ({"method": "successive_halving", "min_resource": 6}, None),
        ({"method": "median", "n_startup_trials": 9}, "median waits for 9 candidates, and there are 8"),
        ({"method": "median", "n_startup_trials": 8}, None),
        ({"method": "median", "n_warmup_steps": 6}, "median looks after step 6, and candidates take at most 8"),
        ({"method": "patience", "patience": 3}, "patience 3 takes 4 evaluations before the last step, and there are 3"),
        ({"method": "patience", "patience": 2}, None),
        ({"method": "target", "target": 1.0}, None),
    ]
    for stopping, text in told:
        prepared = prepare(begun(Run.model_validate(tree(stopping=stopping)))[0])
        found = [note for note in prepared.warnings if note.startswith("sweep.stopping: ")]
        assert len(found) == (text is not None), (stopping, found)
        assert text is None or (text in found[0] and found[0].endswith("so none ends early")), found
    for rule, text in (
        ({"method": "successive_halving", "min_resource": 2}, "successive_halving looks at step 32 first"),
        ({"method": "median", "n_startup_trials": 2}, "median looks after step 0"),
        ({"method": "patience", "patience": 1}, "patience 1 takes 2 evaluations before the last step, and there are 0"),
    ):  # windows of 16 rounds, and an evaluation every 20
        rare = tree(stopping=rule) | {"eval_every": 20}
        rare["jobs"][0]["train"]["max_steps"] = 32
        (note,) = [note for note in prepare(begun(Run.model_validate(rare))[0]).warnings if "sweep.stopping" in note]
        assert text in note
    longer = tree(parameters={"train.max_steps": [4, 40]}, concurrent=1, stopping={"method": "successive_halving"})
    prepared = prepare(begun(Run.model_validate(longer))[0])  # the second one does not begin with the first
    assert not [note for note in prepared.warnings if "sweep" in note]


def test_candidates_that_are_compared_by_other_samples_are_refused(tree: Tree, tmp_path: Path) -> None:
    held, few = tmp_path / "held.jsonl", tmp_path / "few.jsonl"
    lines = [json.dumps({"prompt": "a", "completion": "b;" * size}) + "\n" for size in (3, 4, 45)]
    held.write_text("".join(lines))
    few.write_text(lines[0])
    cases: list[tuple[str, list[Any], str]] = [
        ("drop", [50, 200], rf"differ: a-000 has 2 of {held}; a-001 has 3 of {held}; leave out the key"),
        ("right", [50, 200], rf"a-000 has 3 of {held}, 1 of them cut, with \d+ tokens; a-001 has 3 of {held};"),
        (
            "right",
            [50, 60],
            rf"a-000 has 3 of {held}, 1 of them cut, with \d+ tokens; a-001 has 3 of {held}, 1 of them cut",
        ),
        ("right", [200, 201], ""),
    ]
    for truncate, lengths, message in cases:
        run = tree(parameters={"data.max_length": lengths}, stopping={"method": "none"})
        run["jobs"][0]["data"] |= {"eval_path": str(held), "truncate": truncate}
        run["max_tokens_per_microbatch"] = 256
        with pytest.raises(packlora.InputError, match=message) if message else contextlib.nullcontext():
            prepare(begun(Run.model_validate(run))[0])
    data = tree()["jobs"][0]["data"]
    paths = [data | {"eval_path": str(held)}, data | {"eval_path": str(few)}]
    run = tree(parameters={"data": paths}, stopping={"method": "none"}) | {"max_tokens_per_microbatch": 256}
    with pytest.raises(packlora.InputError, match=rf"a-000 has 3 of {held}; a-001 has 1 of {few};"):
        prepare(begun(Run.model_validate(run))[0])


def test_a_swept_key_that_changes_what_the_metric_measures_is_told(tree: Tree, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(8 * (json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"))
    cases: list[tuple[str, str, list[Any], bool]] = [
        ("eval_loss", "beta", [0.1, 0.5], True), ("eval_loss", "trainer", ["dpo", "orpo"], True),
        ("eval_loss", "loss_type", ["hinge", "sigmoid"], True), ("eval_loss", "weight_decay", [0.1, 0.5], False),
        ("eval_rewards/margins", "beta", [0.1, 0.5], True), ("eval_rewards/margins", "loss_type", ["hinge", "sigmoid"], False),
        ("eval_rewards/accuracies", "beta", [0.1, 0.5], False),
    ]  # fmt: skip
    for metric, key, values, told in cases:
        run = tree(parameters={f"train.{key}": values}, metric=metric, stopping={"method": "none"})
        run["jobs"][0]["data"] = {"path": str(pairs), "eval_path": str(pairs)}
        run["jobs"][0]["train"] |= {"trainer": "dpo"}
        notes = [note for note in prepare(begun(Run.model_validate(run))[0]).warnings if note.startswith("sweep")]
        expected = f"sweep: train.{key} changes the measure of {metric}, so the best value is no proof"
        assert notes == [f"{expected}; eval_rewards/accuracies compares them"] * told, (metric, key)
    rendered = tree(parameters={"data.chat_template": ["chatml", "zephyr"]}, stopping={"method": "none"})
    notes = [note for note in prepare(begun(Run.model_validate(rendered))[0]).warnings if note.startswith("sweep")]
    assert notes == ["sweep: data.chat_template changes the measure of eval_loss, so the best value is no proof"]


def test_random_candidates_that_are_drawn_twice_are_told(tree: Tree) -> None:
    run = tree(parameters={"adapter.r": [2, 4]}, method="random", num_trials=5, stopping={"method": "none"})
    prepared = prepare(begun(Run.model_validate(run))[0])
    (note,) = [note for note in prepared.warnings if "sweep" in note]
    assert note == "sweep: 3 of 5 random candidates have the values of an earlier one, so they are the same job again"


def test_candidates_of_two_trainers_have_each_its_usual_learning_rate_where_the_file_gives_none(tree: Tree) -> None:
    run = tree(parameters={"train.trainer": ["sft", "dpo"]})
    for one in run["jobs"]:
        one.get("train", {}).pop("learning_rate", None)
    joined = [change.join for change in Sweep(Run.model_validate(run)).begin()]
    assert [job.train.learning_rate for job in joined if job is not None] == [2e-4, 5e-6]


def test_random_draws_are_in_their_ranges_and_the_same_every_time(tree: Tree) -> None:
    ranges = {
        "train.learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}, "adapter.r": {"min": 2, "max": 9},
        "train.weight_decay": {"min": 0.0, "max": 0.5}, "adapter.use_dora": [True, False],
    }  # fmt: skip
    run = Run.model_validate(tree(parameters=ranges, method="random", num_trials=40, concurrent=40))
    drawn = [change.parameters for change in Sweep(run).begin()]
    assert drawn == [change.parameters for change in Sweep(run).begin()]
    rates, ranks = ([own[key] for own in drawn] for key in ("train.learning_rate", "adapter.r"))
    assert min(rates) >= 1e-5 and max(rates) <= 1e-3 and -4.4 < sum(map(math.log10, rates)) / 40 < -3.6
    assert set(ranks) == set(range(2, 10)) and len({own["adapter.use_dora"] for own in drawn}) == 2


def test_plan_shows_the_first_candidates(tree: Tree, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree()))
    said = CliRunner().invoke(app, ["plan", str(file)])
    assert said.exit_code == 0 and "a-002" in said.output
