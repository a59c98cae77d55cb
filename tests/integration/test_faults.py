"""Kills, full disks, damaged logs and signals at every step of a run: nothing that was trained is lost, no bit changes."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model
from fault_runs import KINDS, Ended, Runs

from packlora.report.metrics import read_lines

LONG = {"packlora.runtime.record:PAID": 1, "packlora.runtime.history:PIECE": 1}
"""A run of few steps and jobs writes a journal and pieces of log histories, as one of many does."""
LOGS = ("metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl")


@dataclass
class Case:
    """A small run, undisturbed, and what to compare others with."""

    runs: Runs
    tree: dict[str, Any]
    whole: Path
    operations: int

    def file(self, out: Path, **changes: Any) -> Path:
        path = out.with_suffix(".yaml")
        path.write_text(json.dumps({**self.tree, "output_dir": str(out), **changes}))
        return path

    def train(self, out: Path, *options: str, **fault: Any) -> Ended:
        return self.runs.train(self.file(out), *options, **fault)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("faults")
    base = folder / "base"
    tiny_model("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=48).save_pretrained(base)
    tokenizer.save_pretrained(base)
    draw, words = random.Random(0), "the quick brown fox jumps over the lazy dog".split()  # noqa: SIM905
    data = folder / "rows.jsonl"
    rows = [
        {"prompt": " ".join(draw.choices(words, k=draw.randint(2, 9))), "completion": "some more"} for _ in range(6)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = folder / "held-out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    jobs = [
        {
            "name": "plain", "data": {"path": str(data), "eval_path": str(held_out)},
            "adapter": {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
            "train": {"global_batch_size": 2, "learning_rate": 1e-2},
        },
        {
            "name": "dora", "data": {"path": str(data)}, "adapter": {"r": 2, "use_dora": True, "target_modules": ["o_proj"]},
            "train": {"global_batch_size": 3, "num_train_epochs": 2, "learning_rate": 1e-2},
        },
    ]  # fmt: skip
    tree = {
        "base_model": str(base), "max_tokens_per_microbatch": 64, "save_every": 2, "eval_every": 1, "device": "cpu",
        "schedule": {"method": "greedy"}, "jobs": jobs,
    }  # fmt: skip
    with Runs(folder) as runs:
        case = Case(runs, tree, folder / "whole", 0)
        ended = case.train(case.whole)
        assert ended.code == 0, ended.err
        case.operations = ended.operations
        yield case


TIMES = ("seconds", "elapsed", "predicted")


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMES}


def numbers(out: Path, log: str) -> list[dict[str, Any]]:
    """A log's lines without times, in an order of their own."""
    lines = [timeless(json.loads(line)) for line in (out / log).read_text().splitlines()]
    return sorted(lines, key=lambda line: json.dumps(line, sort_keys=True))


def state(folder: Path) -> list[Any]:
    tree = json.loads((folder / "trainer_state.json").read_text())
    kept = [tree[key] for key in ("global_step", "num_input_tokens_seen", "status", "failure", "untrained")]
    return [*kept, *map(timeless, tree["log_history"])]


def same_adapters(case: Case, out: Path) -> None:
    for job in case.tree["jobs"]:
        ours, wanted = out / job["name"], case.whole / job["name"]
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (ours / name).read_bytes() == (wanted / name).read_bytes(), name
        assert state(ours) == state(wanted)


def same_run(case: Case, out: Path) -> None:
    same_adapters(case, out)
    for log in LOGS[:2]:  # the others tell of microbatches, some of which were run twice
        assert numbers(out, log) == numbers(case.whole, log), log
    assert not list(out.glob("**/.tmp-*"))
    assert json.loads((out / "run.json").read_text())["result"]["status"] == "done"


def sound(ended: Ended) -> None:
    assert "Traceback" not in ended.err and "Exception ignored" not in ended.err, ended.err


def checkpoints(out: Path) -> dict[str, list[str]]:
    return {job: sorted(path.name for path in (out / job).glob("*checkpoint-*")) for job in ("plain", "dora")}


def faulted(case: Case, out: Path, kind: str, at: int, constants: dict[str, int]) -> Ended:
    """A run with a fault at its n-th file operation, and then, if it did not finish, one without that goes on."""
    ended = case.train(out, kind=kind, at=at, constants=constants)
    sound(ended)
    if kind == "kill":
        assert ended.code == -signal.SIGKILL
    elif ended.code:
        assert ended.code in (1, 2)
        assert "No space left on device" in ended.err or "Input/output error" in ended.err, ended.err
    else:
        same_adapters(case, out)
    if ended.code:
        again = case.train(out, "--resume", constants=constants)
        sound(again)
        assert again.code == 0, (again.err, ended.err)
        same_run(case, out)
    if kind != "full":  # which leaves no room for a journal that is whole again
        assert checkpoints(out) == checkpoints(case.whole)
        if (out / "journal.jsonl").exists():  # it says what run.json could not be made to say
            assert "incomplete: run.json" in ended.out
    shutil.rmtree(out)
    return ended


def test_a_run_without_faults_makes_operations_to_fail(case: Case) -> None:
    assert case.operations > 60


# --- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "constants"),
    [
        pytest.param(kind, (LONG, {})[at % 2], marks=[pytest.mark.soak] * (kind == "EIO"))
        for at, kind in enumerate(KINDS)
    ],
    ids=KINDS,
)
def test_a_fault_at_a_file_operation_loses_nothing_and_changes_no_bit(
    kind: str, constants: dict[str, int], case: Case, tmp_path: Path
) -> None:
    at = case.operations // 2 + KINDS.index(kind) * 7
    faulted(case, tmp_path / f"{kind}-{at}", kind, at, constants)


@pytest.mark.soak
@pytest.mark.parametrize("constants", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_file_operation_loses_nothing_and_changes_no_bit(
    kind: str, constants: dict[str, int], case: Case, tmp_path: Path
) -> None:
    ended = case.train(tmp_path / "all", constants=constants)
    for at in range(1, ended.operations + 1):
        faulted(case, tmp_path / f"{kind}-{at}", kind, at, constants)


@pytest.mark.parametrize("log", ["metrics.jsonl", "report.html"])
def test_a_log_that_cannot_be_written_is_named_at_the_end_and_training_goes_on(
    log: str, case: Case, tmp_path: Path
) -> None:
    ended = case.train(tmp_path / "out", kind="full", only=log)
    sound(ended)
    assert ended.code == 0, ended.err
    same_adapters(case, tmp_path / "out")
    assert ended.out.count(f"note: {log} is incomplete: No space left on device") == 1
    assert f"incomplete: {log} (No space left on device" in ended.out.splitlines()[-1]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert any(log in text for text in record["warnings"])


def test_a_log_that_could_not_be_written_for_a_while_goes_on_with_whole_lines(case: Case, tmp_path: Path) -> None:
    ended = case.train(tmp_path / "out", kind="EIO", only="metrics.jsonl", at=4)
    sound(ended)
    assert ended.code == 0, ended.err
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    written = read_lines(tmp_path / "out" / "metrics.jsonl", "job", "step", "elapsed")
    assert len(written) == len(text.splitlines()) - 1 == len(numbers(case.whole, "metrics.jsonl")) - 1


def test_a_journal_that_cannot_be_removed_at_once_is_removed_all_the_same(case: Case, tmp_path: Path) -> None:
    """What it says is in run.json then, which lacks nothing."""
    about: dict[str, Any] = {"only": "journal.jsonl", "constants": LONG}
    removal = case.train(tmp_path / "all", **about).operations
    ended = case.train(tmp_path / "out", kind="EIO", at=removal, **about)
    sound(ended)
    assert removal > 9 and ended.code == 0 and "incomplete" not in ended.out, ended.out
    assert not (tmp_path / "out" / "journal.jsonl").exists()
    same_run(case, tmp_path / "out")


def test_a_full_disk_at_a_checkpoint_says_what_was_kept_and_how_to_go_on(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = case.train(out, kind="full", only="plain/.tmp-checkpoint-3", at=2)
    sound(ended)
    assert ended.code == 1
    said = ended.err.splitlines()[-1]
    assert "job 'plain': step 3 cannot be written" in said
    assert "No space left on device" in said and "free some space" in said
    assert "plain: step 2 of 3, dora: step " in said
    assert said.endswith("continue with --resume")
    step = json.loads((out / "run.json").read_text())["result"]["jobs"]["dora"]["step"]
    assert (out / "dora" / f"checkpoint-{step}").exists()  # the other job's newest step was saved first
    assert json.loads((out / "run.json").read_text())["result"]["status"] == "interrupted"
    assert case.train(out, "--resume").code == 0
    same_run(case, out)


def test_a_full_disk_at_the_start_is_a_sentence(case: Case, tmp_path: Path) -> None:
    ended = case.train(tmp_path / "out", kind="full", only="run.json")
    sound(ended)
    assert ended.code == 1
    assert "packlora: cannot write: No space left on device" in ended.err
    assert "free some space there" in ended.err


def damaged(lines: list[str], how: str, draw: random.Random) -> str:
    """A log after a crash or a power loss."""
    text = "\n".join(lines) + "\n"
    if how == "torn":
        return text[: draw.randrange(len(text))]
    if how == "reordered":
        return "\n".join(draw.sample(lines, len(lines))) + "\n"
    if how == "zeros":
        at = draw.randrange(len(text))
        return text[:at] + "\0" * (len(text) - at)
    if how == "noise":
        return "".join(chr(draw.randrange(1, 0x250)) if draw.random() < 0.05 else letter for letter in text)
    assert how == "twice"
    return text + text


def killed_run(case: Case, out: Path, at: int) -> None:
    assert case.train(out, kind="kill", at=at).code == -signal.SIGKILL


def resumed_from_damaged_logs(case: Case, out: Path, how: str, seed: int) -> None:
    draw = random.Random(seed)
    for log in LOGS:
        if (out / log).exists():
            (out / log).write_text(damaged((out / log).read_text().splitlines(), how, draw))
    ended = case.train(out, "--resume")
    sound(ended)
    assert ended.code == 0, ended.err
    same_adapters(case, out)


DAMAGES = ("torn", "reordered", "zeros", "noise", "twice")


@pytest.mark.soak
def test_damaged_logs_change_no_bit_of_what_a_resumed_run_trains(case: Case, tmp_path: Path) -> None:
    killed_run(case, tmp_path / "killed", case.operations * 2 // 3)
    for how in DAMAGES[:3]:
        shutil.copytree(tmp_path / "killed", tmp_path / how)
        resumed_from_damaged_logs(case, tmp_path / how, how, 0)


@pytest.mark.soak
@pytest.mark.parametrize("how", DAMAGES)
def test_logs_damaged_anywhere_change_no_bit_of_what_a_resumed_run_trains(how: str, case: Case, tmp_path: Path) -> None:
    killed_run(case, tmp_path / "killed", case.operations * 2 // 3)
    for seed in range(10):
        out = tmp_path / f"out-{seed}"
        shutil.copytree(tmp_path / "killed", out)
        resumed_from_damaged_logs(case, out, how, seed)


@pytest.mark.soak
def test_a_flipped_byte_anywhere_is_refused_or_changes_no_bit(case: Case, tmp_path: Path) -> None:
    """Never a traceback, never another adapter without a word."""
    killed_run(case, tmp_path / "killed", case.operations * 2 // 3)
    files = sorted(path for path in (tmp_path / "killed").rglob("*") if path.is_file() and path.stat().st_size)
    draw, out = random.Random(0), tmp_path / "out"
    for number in range(100):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "killed", out)
        file = out / draw.choice(files).relative_to(tmp_path / "killed")
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        ended = case.train(out, "--resume")
        assert "Traceback" not in ended.err, (number, file, ended.err)
        assert ended.code in (0, 2), (number, file, ended.err)
        if ended.code == 0:
            same_adapters(case, out)


@pytest.mark.soak
def test_runs_killed_again_and_again_end_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(10):
        out = tmp_path / f"out-{number}"
        code, options = -1, ()
        for _ in range(6):
            ended = case.train(out, *options, kind="kill", at=draw.randrange(1, case.operations))
            sound(ended)
            code, options = ended.code, ("--resume",) if (out / "run.json").exists() else ()
            if code == 0:
                break
        if code:
            assert case.train(out, *options).code == 0
        same_run(case, out)


# --- signals ---------------------------------------------------------------------------------------------------------------

EVALUATE, PAGE = "packlora.runtime.forwards:", "packlora.report.report:write_report"
MICROBATCH, EXECUTOR = "packlora.engine.engine:run_microbatch", "packlora.engine.passes:"
PHASES = {
    "evaluation before the first step": f"{EXECUTOR}collate#1",
    "planning": "packlora.runtime.windows:Plan.following",
    "first step": MICROBATCH,
    "evaluation": f"{EVALUATE}Forwards._try#2",
    "inside an evaluation": f"{EXECUTOR}SingleDevice.evaluate#6",
    "saving": "packlora.runtime.checkpoint:save_checkpoint",
    "report": PAGE,
}
RARE = ("planning", "first step", "evaluation", "evaluation before the first step")


def signalled(case: Case, out: Path, number: signal.Signals, where: str, times: int = 1) -> Ended:
    ended = case.train(out, signal=number, where=where, times=times)
    sound(ended)
    return ended


@pytest.mark.parametrize("phase", [pytest.param(name, marks=[pytest.mark.soak] * (name in RARE)) for name in PHASES])
def test_a_signal_at_any_moment_saves_and_loses_no_step_and_no_evaluation(
    phase: str, case: Case, tmp_path: Path
) -> None:
    number = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[list(PHASES).index(phase) % 3]
    ended = signalled(case, tmp_path / "out", number, PHASES[phase])
    assert ended.code == 128 + number, ended.err
    assert f"{number.name}: finishing the present microbatch" in ended.out
    again = case.train(tmp_path / "out", "--resume")
    assert again.code == 0, again.err
    same_run(case, tmp_path / "out")


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(
    "where",
    [
        MICROBATCH,
        "packlora.engine.heads:judge",
        f"{EXECUTOR}collate",
        PAGE,
        "packlora.runtime.record:write_json",
        "packlora.runtime.checkpoint:save_checkpoint",
        "packlora.runtime.checkpoint:save_result",
        "packlora.engine.adapters:AdapterState.step",
    ],
)
def test_a_signal_at_every_call_saves_and_loses_no_step_and_no_evaluation(
    where: str, number: signal.Signals, case: Case, tmp_path: Path
) -> None:
    for nth in range(1, 100):
        out = tmp_path / f"out-{nth}"
        ended = signalled(case, out, number, f"{where}#{nth}")
        if ended.code == 0:
            same_run(case, out)
            if "finishing the present microbatch" not in ended.out:
                return  # there are fewer calls than that
            continue
        begun = (out / "run.json").exists()  # before that a signal does what it always does
        assert ended.code in (128 + number, *([] if begun else [-number])), ended.err
        assert case.train(out, "--resume").code == 0
        same_run(case, out)
        shutil.rmtree(out)


def test_a_signal_after_the_last_step_lets_the_run_end(case: Case, tmp_path: Path) -> None:
    ended = signalled(case, tmp_path / "out", signal.SIGTERM, "packlora.runtime.trainer:peak_memory")
    assert ended.code == 0, ended.err
    same_run(case, tmp_path / "out")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 128 + signal.SIGHUP), (signal.SIGTERM, 130)])
def test_a_second_signal_stops_at_once_but_a_second_sighup_still_saves(
    number: signal.Signals, code: int, case: Case, tmp_path: Path
) -> None:
    """A shell that ends sends its jobs the SIGHUP that they have had from the kernel."""
    ended = signalled(case, tmp_path / "out", number, f"{MICROBATCH}#4", times=2)
    assert ended.code == code, ended.err
    assert ("stopped at once" in ended.err) == (number != signal.SIGHUP)
    assert bool(list((tmp_path / "out").glob("*/checkpoint-1"))) == (number == signal.SIGHUP)


def test_a_signal_while_a_run_is_checked_leaves_a_folder_that_can_be_used(case: Case, tmp_path: Path) -> None:
    ended = signalled(case, tmp_path / "out", signal.SIGINT, "packlora.runtime.session:prepare")
    assert ended.code == 130
    assert ended.err.splitlines()[-1].startswith("packlora: stopped at once")
    assert case.train(tmp_path / "out").code == 0
    same_run(case, tmp_path / "out")


# --- the terminal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "why"), [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")])
def test_a_run_outlives_its_standard_output(out: str, why: str, case: Case, tmp_path: Path) -> None:
    """`| head -1` and `> /dev/full`."""
    ended = case.train(tmp_path / "out", stdout=out)
    sound(ended)
    assert ended.code == 0, ended.err
    assert ended.err.count(f"standard output takes no more ({why}); the run goes on without it") == 1
    same_run(case, tmp_path / "out")
