"""The report of synthetic runs: what it must say, what it must survive, what it must not do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from packlora.files import lock_folder
from packlora.pipeline import page as pipeline_page
from packlora.report import charts, notebook
from packlora.report.cells import duration
from packlora.report.page import STYLE
from packlora.report.report import write_report
from packlora.report.run_files import JobFiles

NAMES = ("synopsis", "docstrings", "manpages", "dora-x", "a.b-c_d")
CAPACITY = 2048
FAILURE = "step 41: loss nan, gradient norm nan"
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """A folder as a run leaves it. `steps` is that of the longest job; `ending` None is a run in progress, which holds it."""
    with contextlib.ExitStack() as held:

        def make(steps: int = 120, ending: str | None = "done", names: tuple[str, ...] = NAMES, **changes: Any) -> Path:
            write_run(tmp_path, steps, ending, names, **changes)
            if ending is None:
                held.enter_context(lock_folder(tmp_path))
            return tmp_path

        yield make


def write_run(folder: Path, steps: int, ending: str | None, names: tuple[str, ...], **changes: Any) -> None:
    """Write run.json and the three jsonl files of an invented run; the job manpages fails at its step 41."""
    draw = random.Random(7)
    total = {name: max(1, steps * (10 - 2 * (number % 5)) // 10) for number, name in enumerate(names)}
    made = dict(total) if ending else {name: count * 2 // 5 for name, count in total.items()}
    failed = "manpages" if ending == "failed" else None
    if failed:
        made[failed] = min(40, made[failed])
    lengths = {
        name: [min(511, int(draw.lognormvariate(3.2 + 0.45 * (number % 5), 0.6)) + 3) for _ in range(8 * 60)]
        for number, name in enumerate(names)
    }
    metrics, evals, microbatches, elapsed = [], [], [], 0.0
    evals += [{"job": name, "step": 0, "eval_loss": 3.1 - 0.2 * (number % 5)} for number, name in enumerate(names)]
    for step in range(1, max(made.values(), default=0) + 1):
        batches = {name: [draw.choice(lengths[name]) for _ in range(8)] for name in names if step <= made[name]}
        samples = sorted(((n, name) for name, batch in batches.items() for n in batch), reverse=True)
        bins: list[list[tuple[int, str]]] = []
        for sample in samples:
            room = next((b for b in bins if sum(n for n, _ in b) + sample[0] <= CAPACITY), None)
            bins.append([sample]) if room is None else room.append(sample)
        began = elapsed
        for content in bins:
            seconds = sum(n for n, _ in content) / draw.uniform(850, 1000)
            present = [name for name in batches if any(owner == name for _, owner in content)]
            microbatches.append(
                {
                    "index": len(microbatches), "round": step - 1, "capacity": CAPACITY,
                    "tokens": {name: sum(n for n, owner in content if owner == name) for name in present},
                    "samples": {name: sum(owner == name for _, owner in content) for name in present},
                    "seconds": seconds, "predicted": sum(n for n, _ in content) / 1000, "window": (step - 1) // 16 * 16,
                }
            )  # fmt: skip
            elapsed += seconds
        for name, batch in batches.items():
            number = names.index(name)
            floor = 1.4 + 0.25 * (number % 5)
            metrics.append(
                {
                    "job": name, "step": step, "tokens": sum(batch), "seconds": elapsed - began, "elapsed": elapsed,
                    "loss": floor + 1.5 * math.exp(-4 * step / total[name]) + draw.gauss(0, 0.12),
                    "grad_norm": 0.4 + 2 * math.exp(-6 * step / total[name]) * draw.uniform(0.6, 1.5),
                    "lr": 2e-4 * (1 - (step - 1) / total[name]) if number % 2 else 1e-4 * min(1, step / 10),
                }
            )  # fmt: skip
            if step % 25 == 0 or step == total[name]:
                evals.append({"job": name, "step": step, "eval_loss": metrics[-1]["loss"] + 0.1})
    after = {line["job"]: line["eval_loss"] for line in evals if line["step"] > 0}
    tokens = sum(line["tokens"] for line in metrics)
    run: dict[str, Any] = {
        "packlora": "0.1.0",
        "created": "2025-05-06T07:08:09+00:00",
        "config": {
            "base_model": "smollm2-135m", "dtype": "float32", "output_dir": str(folder), "seed": 0,
            "max_tokens_per_microbatch": CAPACITY, "schedule": {"method": "greedy"},
            "jobs": [_job(name, number) for number, name in enumerate(names)],
        },
        "versions": {"python": "3.11.2", "torch": "2.9.0", "transformers": "5.0.0", "peft": "0.18.0"},
        "device": "cpu, 2 threads (AMD EPYC)",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "model": {"parameters": 134_515_008, "type": "llama"},
        "jobs": {
            name: {
                "samples": len(lengths[name]), "eval_samples": 64, "tokens": sum(lengths[name]),
                "label_tokens": sum(lengths[name]) * 3 // 4, "steps": total[name], "trainable_parameters": 2_442_240,
                "adapted_modules": 210, "truncated": 0, "dropped": 3 if name == "docstrings" else 0,
                "length_histogram": _histogram(lengths[name]),
            }
            for name in names
        },
        "warnings": [],
        "result": None,
    }  # fmt: skip
    if ending:
        run["result"] = {
            "status": ending, "seconds": elapsed + 12, "tokens": tokens, "tokens_per_second": tokens / (elapsed + 12),
            "peak_memory_bytes": 2_345_678_901,
            "jobs": {
                name: {
                    "status": "failed" if name == failed else "done" if made[name] == total[name] else "running",
                    "step": made[name], "failure": FAILURE if name == failed else None,
                    "eval_before": 3.1 - 0.2 * (number % 5), "eval_after": None if name == failed else after.get(name),
                }
                for number, name in enumerate(names)
            },
        }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**run, **changes}), encoding="utf-8")
    windows = [
        {
            "window": first, "rounds": 16, "method": "auto", "microbatches": count, "noops": 0, "bound": count - (first == 0),
            "gap": 0.0, "stopped": "at the bound" if first else "node limit", "seconds": 0.02,
        }
        for first in sorted({line["window"] for line in microbatches})
        if (count := sum(line["window"] == first for line in microbatches))
    ]  # fmt: skip
    files = {"metrics": metrics, "evals": evals, "microbatches": microbatches, "windows": windows}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _job(name: str, number: int) -> dict[str, Any]:
    adapter = {"r": 8 << (number % 3), "lora_alpha": 16.0, "lora_dropout": 0.05 * (number % 2), "bias": "none"}
    kind = {"use_dora": name.startswith("dora"), "use_rslora": number == 1, "target_modules": "all-linear"}
    if number == 2:
        kind["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    schedule = "linear" if number % 2 else "constant_with_warmup"
    return {
        "name": name,
        "data": {"path": f"data/{name}.jsonl", "eval_path": None, "max_length": 512, "truncate": "drop"},
        "adapter": {**adapter, **kind},
        "train": {"global_batch_size": 8, "learning_rate": (1e-4, 2e-4)[number % 2], "lr_scheduler_type": schedule},
    }


def _histogram(lengths: list[int]) -> dict[str, list[float]]:
    low, width = min(lengths), (max(lengths) - min(lengths)) / 24
    counts = [0.0] * 24
    for length in lengths:
        counts[min(23, int((length - low) / width))] += 1
    return {"edges": [low + width * number for number in range(25)], "counts": [int(count) for count in counts]}


class _Page(HTMLParser):
    """The text of a page, its tags with their attributes, and whether every element was closed in order."""

    VOID = ("meta", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)


def _write(folder: Path) -> tuple[str, _Page]:
    html = write_report(folder).read_text(encoding="utf-8")
    page = _Page(html)
    assert not page.crossed
    assert not page.open
    return html, page


def _row(html: str, name: str) -> str:
    """The text of a job's row in the table."""
    rows = [_Page(row).text for row in re.findall("<tr id=.*?</tr>", html)]
    return next(row for row in rows if row.startswith(name))


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


# --- what it says ------------------------------------------------------------------------------------------------------


def test_every_job_has_a_row_with_its_first_and_last_loss(make_run: MakeRun) -> None:
    folder = make_run(steps=50)
    html, _ = _write(folder)
    results = json.loads((folder / "run.json").read_text())["result"]["jobs"]
    for name in NAMES:
        losses = [line["loss"] for line in _lines(folder, "metrics.jsonl") if line["job"] == name]
        few = min(10, max(1, len(losses) // 4))
        row = _row(html, name)
        assert f"{sum(losses[:few]) / few:.3f} → {sum(losses[-few:]) / few:.3f}" in row
        assert f"{results[name]['eval_before']:.3f} → {results[name]['eval_after']:.3f}" in row
        assert f"{len(losses)} / {len(losses)}" in row


def test_the_kind_of_each_adapter_is_named(make_run: MakeRun) -> None:
    html, _ = _write(make_run(steps=5))
    kinds = {name: _row(html, name).split("✓")[0] for name in NAMES}
    assert " LoRA 8 16 0 0.0001 " in kinds["synopsis"]
    assert " rsLoRA 16 16 0.05 0.0002 " in kinds["docstrings"]
    assert " q_proj, k_proj, v_proj, o_proj LoRA 32 " in kinds["manpages"]
    assert " DoRA 8 " in kinds["dora-x"]


def test_headline_figures_add_up_the_files(make_run: MakeRun) -> None:
    folder = make_run()
    _, page = _write(folder)
    microbatches = _lines(folder, "microbatches.jsonl")
    held = sum(sum(line["tokens"].values()) for line in microbatches)
    assert f"Tokens {held / 1e3:.0f}" in page.text
    assert f"{held:,}" in page.text
    assert f"Microbatch fill {100 * held / CAPACITY / len(microbatches):.1f} %" in page.text
    assert f"padding 0, {len(microbatches)} microbatches" in page.text
    assert f"Optimizer steps {len(_lines(folder, 'metrics.jsonl'))}" in page.text
    assert "Peak memory 2.18 GiB" in page.text


def test_every_drawn_microbatch_is_as_long_as_its_tokens(make_run: MakeRun) -> None:
    folder = make_run(steps=10)
    html, _ = _write(folder)
    section = html[html.index("<h2>Microbatches") : html.index("<h2>Schedule")]
    widths = [float(width) for width in re.findall(r'<rect class="mark fill job-\d+"[^>]* width="([\d.]+)"', section)]
    tokens = [count for line in _lines(folder, "microbatches.jsonl") for count in line["tokens"].values()]
    assert len(widths) == len(tokens)
    scale = sum(widths) / sum(tokens)
    assert all(abs(width - scale * count) < 0.2 for width, count in zip(widths, tokens, strict=True))


def test_of_a_long_run_the_first_and_last_microbatches_are_drawn_and_the_page_says_so(make_run: MakeRun) -> None:
    folder = make_run(steps=200)
    html, page = _write(folder)
    count = len(_lines(folder, "microbatches.jsonl"))
    assert f"The first and the last 40 of {count:,} are drawn." in page.text
    drawn = {int(index) for index in re.findall(r"microbatch (\d+), round", html)}
    assert drawn == {*range(40), *range(count - 40, count)}


def test_the_figures_of_a_resumed_run_are_those_of_all_its_parts(make_run: MakeRun) -> None:
    folder = make_run(steps=40)
    run = json.loads((folder / "run.json").read_text())
    metrics = _lines(folder, "metrics.jsonl")
    tokens, seconds = sum(line["tokens"] for line in metrics), metrics[-1]["elapsed"]
    run["result"].update(tokens=100, seconds=1.0, tokens_per_second=100.0)  # a result counts its own part alone
    (folder / "run.json").write_text(json.dumps(run))
    _, page = _write(folder)
    assert f"Tokens {tokens:,} trained on" in page.text
    assert f"Tokens per second {tokens / seconds:,.0f} " in page.text


def test_the_whole_run_file_is_in_the_page(make_run: MakeRun) -> None:
    _, page = _write(make_run(steps=3))
    for text in ("max_tokens_per_microbatch: 2048", "name: a.b-c_d", "use_dora: true", "AMD EPYC", "0123456789abcdef"):
        assert text in page.text


def test_the_run_is_named_in_the_tab_and_in_the_title_with_its_base_below(make_run: MakeRun) -> None:
    folder = make_run(steps=3)
    html, _ = _write(folder)
    assert f"<title>{folder.name} · done · packlora</title>" in html and f"<h1>{folder.name} " in html
    assert "<span>smollm2-135m</span>" in html


@pytest.mark.parametrize(
    ("train", "kind", "unit"),
    [
        ({}, "SFT", "nats per token"),
        ({"trainer": "dpo"}, "DPO", "nats per pair"),
        ({"trainer": "dpo", "loss_type": ["ipo", "sft"]}, "DPO (ipo, sft)", "per pair"),
        ({"trainer": "orpo"}, "ORPO", "per pair"),
        ({"trainer": "kto", "loss_type": "apo_zero_unpaired"}, "KTO (apo_zero_unpaired)", "per sample"),
        ({"trainer": "sft", "objective": "own/loss.py:mine"}, "loss.py:mine", ""),
    ],
)
def test_losses_of_one_kind_share_an_axis_and_its_unit(train: dict[str, Any], kind: str, unit: str) -> None:
    assert JobFiles("a", "job-0", {"train": train}, {}, {}, [], []).loss == (kind, unit)


def test_the_time_left_is_that_of_the_slowest_job_at_the_pace_of_its_last_steps(make_run: MakeRun) -> None:
    folder = make_run(steps=50, ending=None)
    lines = {name: [line for line in _lines(folder, "metrics.jsonl") if line["job"] == name][-20:] for name in NAMES}
    totals = {name: own["steps"] for name, own in json.loads((folder / "run.json").read_text())["jobs"].items()}

    def left(name: str) -> float:
        first, last = lines[name][0], lines[name][-1]
        pace = (last["elapsed"] - first["elapsed"]) / (last["step"] - first["step"])
        return (totals[name] - last["step"]) * pace

    _, page = _write(folder)
    assert f"Time left {duration(max(map(left, NAMES)))} {duration(lines[NAMES[0]][-1]['elapsed'])} so far" in page.text
    (folder / "metrics.jsonl").write_text("")
    assert "Time left" not in _write(folder)[1].text


# --- what went wrong ---------------------------------------------------------------------------------------------------


def test_a_failed_job_is_named_with_its_reason_before_the_table_and_once(make_run: MakeRun) -> None:
    html, page = _write(make_run(ending="failed", warnings=[f"job 'manpages' was stopped: {FAILURE}"]))
    assert f"manpages failed: {FAILURE}" in page.text
    assert page.text.count(FAILURE) == 1
    assert html.index(FAILURE) < html.index("<table")
    assert "✕ failed" in _row(html, "manpages")
    assert "✓ done" in _row(html, "synopsis")


def test_a_job_that_failed_in_a_run_in_progress_is_not_shown_as_running(make_run: MakeRun) -> None:
    folder = make_run(ending=None)
    (folder / "manpages").mkdir()
    state = {"global_step": 12, "status": "failed", "failure": FAILURE}
    (folder / "manpages" / "trainer_state.json").write_text(json.dumps(state))
    html, page = _write(folder)
    assert f"manpages failed: {FAILURE}" in page.text
    assert "✕ failed" in _row(html, "manpages")
    assert "▶ running" in _row(html, "synopsis")


def test_dropped_samples_are_warned_about_once(make_run: MakeRun) -> None:
    _, derived = _write(make_run(steps=3))
    assert "docstrings 3 samples dropped as too long" in derived.text
    recorded = "job 'docstrings': 3 samples were dropped as too long"
    _, page = _write(make_run(steps=3, warnings=[recorded]))
    assert recorded in page.text
    assert page.text.count("dropped as too long") == 1


def test_jobs_that_were_asked_to_end_early_are_no_warning(make_run: MakeRun) -> None:
    notes = [
        "job 'synopsis' ends at step 12 of 50: successive halving: one in 3 goes on",
        "job 'dora-x' ends at step 4 of 50, as asked by packlora stop",
        "job 'other' ends at step 4 of 50: of no job",
    ]
    html, page = _write(make_run(steps=50, warnings=notes))
    (warnings,) = re.findall('<ul class="warnings".*?</ul>', html)
    assert notes[2] in _Page(warnings).text and "halving" not in warnings and "packlora stop" not in warnings
    assert "◼ ended early successive halving: one in 3 goes on" in _row(html, "synopsis")
    assert "◼ ended early as asked by packlora stop" in _row(html, "dora-x")
    assert "2 ended early" in page.text


def test_the_gpu_is_shown_where_it_was_looked_at(make_run: MakeRun) -> None:
    folder = make_run(steps=10)
    assert "GPU busy" not in _write(folder)[1].text
    rows = _lines(folder, "microbatches.jsonl")
    shares = [round(number / len(rows), 3) for number in range(len(rows))]
    rows = [{**row, "gpu": share, "elapsed": row["index"] + 1} for row, share in zip(rows, shares, strict=True)]
    (folder / "microbatches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html, page = _write(folder)
    assert f"GPU busy {100 * sum(shares) / len(shares):.0f} %" in page.text
    (numbers,) = re.findall('<script type="application/json" class="numbers">(.*?)</script>', html)
    assert json.loads(numbers)["machine"]["mean"]["gpu"] == shares


def test_the_schedule_is_described_and_predicted_times_stand_against_measured_ones(make_run: MakeRun) -> None:
    folder = make_run(steps=60, schedule={"budget": CAPACITY, "profile": {"origin": "remembered"}})
    html, page = _write(folder)
    windows = _lines(folder, "windows.jsonl")
    slots, bound = sum(line["microbatches"] for line in windows), sum(line["bound"] for line in windows)
    assert f"{slots:,}, the lower bound is {bound:,}" in page.text
    assert f"{100 * (slots / bound - 1):.1f} %" in page.text
    assert f"at the bound ({len(windows) - 1} of {len(windows)} windows)" in page.text
    assert f"node limit (1 of {len(windows)} windows)" in page.text
    assert "microbatches measured in an earlier run" in page.text
    ratios = sorted(line["seconds"] / line["predicted"] for line in _lines(folder, "microbatches.jsonl"))
    assert f"median {ratios[round(0.5 * (len(ratios) - 1))]:.2f}" in page.text
    chart = html[html.index("Time of a microbatch") : html.index("Measured over predicted")]
    assert chart.count('<path class="dot small neutral"') == len(ratios)
    assert "var(--ink)" in STYLE and ".neutral{--ink:var(--soft)}" in STYLE  # of the page's theme


def test_a_window_that_was_planned_again_counts_once(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    first = {**_lines(folder, "windows.jsonl")[0], "microbatches": 1000}
    text = (folder / "windows.jsonl").read_text()
    (folder / "windows.jsonl").write_text(json.dumps(first) + "\n" + text)
    again, _ = _write(folder)
    (folder / "windows.jsonl").write_text(text)
    assert _timeless(_write(folder)[0]) == _timeless(again)


def test_a_run_without_predictions_says_nothing_of_them(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    (folder / "windows.jsonl").unlink()
    rows = [{k: v for k, v in line.items() if k != "predicted"} for line in _lines(folder, "microbatches.jsonl")]
    (folder / "microbatches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, page = _write(folder)
    assert "Time of a microbatch" not in page.text
    assert "Schedule" not in page.text


def test_an_interrupted_run_calls_unfinished_jobs_stopped(make_run: MakeRun) -> None:
    folder = make_run(steps=30)
    run = json.loads((folder / "run.json").read_text())
    run["result"]["status"] = "interrupted"
    run["result"]["jobs"]["synopsis"].update(status="running", step=20)
    (folder / "run.json").write_text(json.dumps(run))
    html, page = _write(folder)
    assert f"{folder.name} ◼ interrupted" in page.text
    assert "◼ stopped" in _row(html, "synopsis")


def test_text_from_users_is_escaped_wherever_it_appears(make_run: MakeRun) -> None:
    nasty = '<script>alert("1")</script>&'
    folder = make_run(steps=40, ending="failed", names=("manpages", f"x{nasty}"), warnings=[nasty], device=nasty)
    run = json.loads((folder / "run.json").read_text())
    run["config"]["base_model"] = nasty
    run["config"]["jobs"][0]["data"]["path"] = nasty
    run["config"]["jobs"][0]["adapter"]["target_modules"] = [nasty]
    run["versions"][nasty] = nasty
    run["result"]["jobs"]["manpages"]["failure"] = nasty
    run["jobs"][f"x{nasty}"]["truncated"] = 1
    (folder / "run.json").write_text(json.dumps(run))
    html, page = _write(folder)
    assert nasty not in html and "<script>alert" not in html
    assert "alert(" in page.text
    assert [tags for tag, tags in page.tags if tag == "script"] == [
        {"type": "application/json", "class": "numbers"},
        {},
    ]
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "link", "iframe", "object", "style="})
    (numbers,) = re.findall('<script type="application/json" class="numbers">(.*?)</script>', html)
    assert json.loads(numbers)["jobs"][1]["name"] == f"x{nasty}"


# --- what it survives --------------------------------------------------------------------------------------------------


def test_a_run_without_steps_gives_a_page(make_run: MakeRun) -> None:
    folder = make_run(steps=10, ending=None)
    for name in ("metrics.jsonl", "evals.jsonl"):
        (folder / name).write_text("")
    (folder / "microbatches.jsonl").unlink()
    html, page = _write(folder)
    assert "No optimizer step has finished yet" in page.text
    assert all("… waiting" in _row(html, name) for name in NAMES)
    assert "Sample lengths" in page.text


def test_metrics_without_a_readable_run_file_still_give_the_losses(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    (folder / "run.json").write_text('{"packlora": "0.1')
    html, _ = _write(folder)
    assert all(name in _row(html, name) for name in NAMES)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl"])
@pytest.mark.parametrize("half", ['{"job": "synopsis", "step": 99', '{"job": "', "{", '{"job": "caf\xe9', "{}", "7"])
def test_a_half_written_last_line_is_ignored(make_run: MakeRun, name: str, half: str) -> None:
    folder = make_run(steps=10)
    whole, _ = _write(folder)
    with (folder / name).open("ab") as file:
        file.write(half.encode("latin-1"))
    cut, _ = _write(folder)
    assert _timeless(cut) == _timeless(whole)


def _timeless(html: str) -> str:
    return re.sub("Written .*? UTC", "", html)


def test_losses_that_are_not_numbers_leave_the_page_readable(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    with (folder / "metrics.jsonl").open("a") as file:
        for loss in ("NaN", "Infinity", "null"):
            file.write(f'{{"job": "synopsis", "step": 21, "loss": {loss}, "grad_norm": {loss}, "lr": 0.1}}\n')
    html, _ = _write(folder)
    drawn = re.findall(r'(?:points|d|x|y|width|height)="([^"]*)"', html)
    assert not [value for value in drawn if "nan" in value or "inf" in value]


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("names", [("only",), tuple(f"job{number}" for number in range(5))])
def test_a_run_of_very_few_steps_gives_a_page(make_run: MakeRun, steps: int, names: tuple[str, ...]) -> None:
    html, _ = _write(make_run(steps=steps, names=names))
    assert all(name in _row(html, name) for name in names)


def test_ten_thousand_steps_are_drawn_in_seconds_and_two_megabytes(make_run: MakeRun) -> None:
    folder = make_run(steps=3500)
    assert len(_lines(folder, "metrics.jsonl")) > 10_000
    start = time.process_time()
    html, _ = _write(folder)
    assert time.process_time() - start < 20
    assert len(html) < 2_000_000


# --- what it does not do -----------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_runs_nothing_but_its_own_script_and_holds_the_browser_to_that(
    make_run: MakeRun,
) -> None:
    html, page = _write(make_run(steps=30, ending="failed"))
    namespace = "http://www.w3.org/2000/svg"  # a name, which nobody asks for
    assert not re.search(r"https?://|url\((?!#)|@import|src=", html.replace(namespace, ""))
    assert not [tags for _, tags in page.tags if "href" in tags]
    policies = [tags["content"] for tag, tags in page.tags if tag == "meta" and "http-equiv" in tags]
    own = base64.b64encode(hashlib.sha256(html.split("<script>")[1].split("</script>")[0].encode()).digest()).decode()
    rules = {rule.split()[0]: rule.split()[1:] for rule in policies[0].split(";")}
    assert len(policies) == 1 and rules == {
        "default-src": ["'none'"], "style-src": ["'unsafe-inline'"], "script-src": [f"'sha256-{own}'"],
        "base-uri": ["'none'"], "form-action": ["'none'"],
    }  # fmt: skip


def test_the_page_is_small(make_run: MakeRun) -> None:
    folder = make_run(steps=0, names=())
    assert len(_write(folder)[0]) < 80_000


def test_no_id_stands_twice_in_a_page(make_run: MakeRun) -> None:
    _, page = _write(make_run(steps=30))
    ids = [tags["id"] for _, tags in page.tags if "id" in tags]
    assert len(ids) == len(set(ids)) == len(NAMES)


# --- charts ------------------------------------------------------------------------------------------------------------


def test_thinning_keeps_the_highest_the_lowest_and_the_order() -> None:
    points = [(float(x), math.sin(x / 50) + (9.0 if x == 777 else 0.0)) for x in range(5000)]
    few = notebook.thin(points, most=200)
    assert len(few) <= 200
    assert few == sorted(few)
    for pick in (min, max):
        assert pick(points, key=lambda point: point[1]) in few


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0, 2e-4], ["0", "5e-5", "1.0e-4", "1.5e-4", "2.0e-4"]),
        ([0, 40_000], ["0", "10k", "20k", "30k", "40k"]),
        ([2.5, 2.5], ["2.50", "2.55", "2.60", "2.65", "2.70", "2.75"]),
    ],
)
def test_ticks_are_round_numbers_with_the_digits_they_need(values: list[float], texts: list[str]) -> None:
    axis = charts.linear_axis("", values)
    assert [text for _, text in axis.ticks] == texts
    assert axis.low <= min(values) <= max(values) <= axis.high


def test_a_value_off_the_scale_is_drawn_on_its_edge() -> None:
    for axis in (charts.linear_axis("", [1.0, 9.0]), charts.Axis("", 9, 1, ())):
        assert [axis.at(min(axis.low, axis.high) / 2), axis.at(99.0)] in ([0, charts.SIZE], [charts.SIZE, 0])


@pytest.mark.parametrize("before", [2, 4])
def test_a_pipeline_that_went_on_with_another_number_of_stages_is_shown_by_the_newest(
    before: int, tmp_path: Path
) -> None:
    def window(stages: int, seconds: float) -> dict[str, Any]:
        own = {
            "slots": 4,
            "tokens": 90,
            "seconds": seconds,
            "busy": [1.0] * stages,
            "bubble": 0.1,
            "mfu": 0.2,
            "spans": [],
        }
        return own | {"predicted_seconds": 2.0, "predicted_bubble": 0.2, "peak_memory": [2**30] * stages}

    lines = [window(before, 8.0), window(3, 2.0), window(3, 2.0)]
    (tmp_path / "pipeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = pipeline_page.section(tmp_path, {})
    assert found.count("<th scope='row'>") == 3 and "empty 2 times, and ran for 4 s" in found
