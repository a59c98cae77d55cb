"""Benchmarks: each runs its smallest case, pages show what result files hold, and the paired loop times what it says."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig
from waiting import wait_for

from benchmarks import commands, contenders, harness, large_served, layers, peer_block, tables, watched
from benchmarks.__main__ import NAMES, main
from benchmarks.contenders import stepped
from benchmarks.harness import Benchmark, Options, case, choose, plan_of, row_of
from benchmarks.peers import eager, sources
from benchmarks.peers.compose import compose
from benchmarks.pipeline import plot_rates
from packlora.adapters import norms
from packlora.adapters.attach import attach
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.errors import InputError
from packlora.ops.lora_linear.plan import PLANS
from packlora.parallel.alone import OneProcess
from packlora.tune import timing
from packlora.tune.timing import Contender, Timing, Timings, Work, geomean, paired

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RESULTS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def bench_of(name: str) -> Benchmark:
    module, _, attribute = NAMES[name].partition(":")
    bench: Benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), attribute)
    return bench


def nothing() -> None:
    pass


# --- every benchmark ---------------------------------------------------------------------------------------------------

SMALLEST = {
    "layer": "T64,packlora,peft_bf16", "multi": "packlora,peft_bf16", "model": "layer,Llama-3.1-8B,packlora",
    "dora": "layer,norm,compose,packlora,packlora_stepped,packlora_accelerate,paper,copy,kernel_both",
    "graphs": "packlora_merged",
    "quantised": "4jobs,lora_r16,packlora", "experts": "1job,dora_r16,packlora", "vlm": "forward,bf16,packlora",
    "small": "dora,compiled,packlora", "workloads": "packlora", "schedule": "jobs,1,auto",
    "peers": "packlora,peft_bf16", "megatron": "plain", "speed": "", "parity": "", "dora-fidelity": "",
    "dora-convergence": "packlora,peft_reversed", "sweep": "halving", "sampling": "", "fit": "nf4,24GB",
    "fp8": "bf16,fp8",
}  # fmt: skip
"""Words of `--only`. Those that start commands are below, those of processes in tests/parallel."""


def test_every_benchmark_runs_its_smallest_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_base: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny model stands in for SmolLM2-135M."""
    for module in ("benchmarks.training", "benchmarks.quality", "packlora.base.demo_model"):
        monkeypatch.setattr(f"{module}.demo_model_folder", lambda: Path(tiny_base("shallow")))
    for name, only in SMALLEST.items():
        out = tmp_path / f"{name}.json"
        words = [name, "--quick", "--device", "cpu", "--out", str(out), *(["--only", only] if only else [])]
        assert main(words) == 0, f"{name}: {capsys.readouterr().err}"
        content = json.loads(out.read_text())
        assert content["name"] == f"{name}-cpu" and content["protocol"] and content["versions"]["torch"], name
        assert content["rows"] and content["commit"], name
        assert all(not row.get("failed") for row in content["rows"]), name
        assert all(key.startswith("part_") for key in content["summary"]), "a part must not look like the whole"
        for row in content["rows"]:
            notes = {contender for contender in row.get("notes", {}) if contender.startswith("packlora")}
            timed = name in ("layer", "dora", "model", "vlm") and "frozen" in row["ms"]
            assert not timed or notes, f"{name}: what packlora did is not said"


def test_labels_of_all_cases_differ_and_the_first_contender_is_the_one_to_compare_with() -> None:
    for name in NAMES:
        bench = bench_of(name)
        for options in (Options(torch.device("cuda")), Options(torch.device("cuda"), quick=True)):
            labels = [one.label for one in bench.cases(options)]
            assert labels and len(set(labels)) == len(labels), name
            json.dumps([dict(one.values) for one in bench.cases(options)])
        assert len(set(bench.contenders)) == len(bench.contenders), name


def test_a_case_in_parts_ends_between_two_of_them_and_is_measured_again(tmp_path: Path) -> None:
    done: list[str] = []

    def measure(one: harness.Case, names: list[str], options: Options) -> Iterator[harness.Row]:
        row: harness.Row = {"failed": {}}
        for number, name in enumerate(names, 1):
            done.append(name)
            row = row | {name: number}
            yield row | ({"unfinished": names[number:]} if names[number:] else {})

    bench = Benchmark(lambda _: [case("a")], measure, lambda _: {}, "how", ["x", "y"], by_case=True, where="any")
    out = tmp_path / "toy.json"

    def rows(**asked: Any) -> list[harness.Row]:
        done.clear()
        assert harness.run("toy", bench, out, quick=True, device="cpu", **asked) == 0
        found: list[harness.Row] = json.loads(out.read_text())["rows"]
        return [{key: value for key, value in row.items() if key != "measured"} for row in found]

    assert rows(seconds=-1.0) == [{"case": "a", "failed": {}, "x": 1, "unfinished": ["y"]}] and done == ["x"]
    assert rows(resume=True) == [{"case": "a", "failed": {}, "x": 1, "y": 2}] and done == ["x", "y"]
    assert rows(resume=True) and not done


def test_figures_of_result_files_are_those_of_their_rows() -> None:
    """The keys are a contract. Figures that were measured once have no code any more: four adapters with DoRA, norms of a whole
    model, rounding near 1; rows of some older files have another form."""
    compared = 0
    for name, file in ((name, file) for name in NAMES for file in sorted(RESULTS) if file.rpartition("-")[0] == name):
        content = RESULTS[file]
        older = name == "schedule" or file == "sweep-h200" or not all("case" in row for row in content["rows"])
        if older or (name == "dora-convergence" and "convergence_over_noise" not in content["summary"]):
            continue
        made = bench_of(name).summary(content["rows"])
        if content.get("not_measured"):  # keys of a part of a benchmark say so
            made |= {f"part_{key}": value for key, value in made.items()}
        gone = {key for key in content["summary"] if key not in made}
        known = ("multi_", "norm_8b", "near_unity")
        assert all(any(word in key for word in known) for key in gone), (file, gone)
        for key in content["summary"].keys() - gone:
            wanted = content["summary"][key]
            close = made[key] == wanted or made[key] == pytest.approx(wanted, rel=1e-9)
            assert close, (file, key, made[key], wanted)
            compared += 1
    assert compared > 500


# --- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_show_what_result_files_hold(page: str) -> None:
    text = (ROOT / page).read_text()
    assert tables.filled(text) == text, "run python -m benchmarks tables"
    assert tables.missing(text) == []


def test_sentences_with_a_check_have_the_file_s_figures_on_every_page() -> None:
    """Also on pages whose links name no commit."""
    pages = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    checked = [name for name, text in pages.items() if "<!-- check " in text]
    assert "docs/accelerate.md" in checked and not {
        name: found for name in checked if (found := tables.missing(pages[name]))
    }


def test_a_figure_that_is_not_the_file_s_is_noticed() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| 4096 x 4096, 8192 | "))
    changed = page.replace(row, row.replace("| 4096 x 4096, 8192 | ", "| 4096 x 4096, 8192 | 1"))
    assert changed != page and tables.filled(changed) == page and "96.0% of the batches" in page
    assert len(tables.missing(page.replace("96.0% of the batches", "96.7% of the batches"))) == 1
    head = "<!-- table\nexperts-h200: {case} | {ms[peft]:.0f} | {vs_peft:.1f}\n-->\n\n| a | b | c |\n|---|---|---|\n"
    made = tables.filled(head).splitlines()
    assert "| 4jobs dora_r16 T8192 | - | - |" in made and "| 1job lora_r16 T8192 | 85 | 1.5 |" in made
    with pytest.raises(ValueError, match="no row of experts-h200"):
        tables.filled(head.replace("experts-h200:", "experts-h200 case=none:"))


# --- what is asked for ---------------------------------------------------------------------------------------------------


def toy(measured: list[str], broken: str = "") -> Benchmark:
    """Three cases, of which `broken` fails."""

    def measure(one: harness.Case, names: list[str], options: Options) -> dict[str, Any]:
        measured.append(one.label)
        return {"failed": {"packlora": "broke"} if one.label == broken else {}}

    def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"cases": len(rows)}

    cases = [case(f"{name} T{T}", name=name, T=T) for name, T in (("a", 1), ("a", 2), ("b", 2))]
    return Benchmark(lambda options: cases, measure, summary, "how", ["frozen", "packlora"], ["slow"], where="cpu")


def test_a_run_goes_on_where_it_was_and_keeps_the_cases_that_it_is_not_asked_for(tmp_path: Path) -> None:
    out, measured = tmp_path / "toy.json", list[str]()

    def run(bench: Benchmark, **asked: Any) -> tuple[int, list[str], dict[str, Any]]:
        measured.clear()
        code = harness.run("toy", bench, out, **asked)
        return code, list(measured), json.loads(out.read_text())

    _, done, file = run(toy(measured), seconds=-1)
    assert done == ["a T1"] and file["not_measured"] == ["a T2", "b T2"] and file["summary"] == {"part_cases": 1}
    code, done, file = run(toy(measured, broken="b T2"), resume=True)
    assert code == 1 and done == ["a T2", "b T2"] and "not_measured" not in file and file["summary"] == {"cases": 3}
    assert ["measured" in row for row in file["rows"]] == [True, False, False]
    assert run(toy(measured), resume=True)[1] == ["b T2"], "a case in which something failed is measured again"
    assert run(toy(measured), resume=True)[1] == []
    _, done, file = run(toy(measured), only=["T2", "a"])
    assert done == ["a T2"] and [row["case"] for row in file["rows"]] == ["a T1", "a T2", "b T2"]
    with pytest.raises(InputError, match="name another file"):
        run(replace(toy(measured), contenders=["frozen", "packlora", "peft"]), only=["packlora"])
    assert run(toy(measured))[1] == ["a T1", "a T2", "b T2"], "without --resume and --only all of it is measured"
    out.write_text("[]")
    with pytest.raises(InputError, match="is no results file"):
        run(toy(measured), resume=True)


def test_a_file_keeps_the_rows_of_other_numbers_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--only` rows of the same table go, also those of units that it has no more."""
    out, mesh = tmp_path / "toy.json", OneProcess()
    mesh.size = 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(harness, "processes", lambda: contextlib.nullcontext(mesh))
    bench = replace(toy([]), where="processes", by_case=True)
    monkeypatch.setattr(harness, "choose_device", lambda device: CPU)
    rows = [{"case": label, "failed": {}} for label in ("a T1 unit 9", "x4 unit 1")]
    harness.write_results(out, "toy-cpu", "how", rows, {}, CPU, asked={"quick": True, "layers": None, "named": False})
    assert harness.run("toy", bench, out, quick=True, device="cpu") == 0
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == ["x4 unit 1", "a T1", "a T2", "b T2"]


def test_only_chooses_contenders_and_cases() -> None:
    bench = toy([])
    cases = bench.cases(Options(CPU))
    assert choose(["T2", "packlora"], bench, cases) == (["frozen", "packlora"], cases[1:], True)
    assert choose(["a", "b", "T2"], bench, cases) == (["frozen", "packlora"], cases[1:], False)
    assert choose(["packlora:routed/routed-one-pass/routed"], bench, cases)[0][1].startswith("packlora:routed")
    for words, said in ((["T9"], "'T9' is neither a contender"), (["b", "T1"], "no case has all of T1, b"),
                        (["packlora:fast"], "plan 'fast'")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            choose(words, bench, cases)
    for named in PLANS:
        assert plan_of(f"packlora:{named.name}") == plan_of(f"packlora:{named.plan.name}") == named.plan


def test_a_pipeline_is_drawn_with_every_way_that_its_file_has(tmp_path: Path) -> None:
    rows = RESULTS["pipeline-4-h200"]["rows"]
    ways = {way for row in rows for way, own in row.items() if isinstance(own, dict) and "tokens" in own}
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words
        plot_rates(rows, tmp_path / "pipe.json")
    drawn = (tmp_path / "pipe-rates.svg").read_text()
    assert len(ways) == 5 and all(f">{way}<" in drawn for way in ways) and "bubble 11.7%" in drawn
    with pytest.raises(InputError, match="plots: toy draws no picture"):
        harness.run("toy", toy([]), tmp_path / "toy.json", device="cpu", plots=True)


def test_contenders_beside_all_usual_ones_make_neither_a_part_nor_other_cases(tmp_path: Path) -> None:
    """So the ways that a pipeline's breakdown adds are figures of the whole benchmark."""
    bench = Benchmark(
        lambda options: [case("a"), *([case("b")] if options.chosen else [])],
        lambda one, names, options: {"names": names, "failed": {}},
        lambda rows: {"rows": len(rows)}, "how", ["x", "y", "w"], ["z"], where="any",
    )  # fmt: skip
    out = tmp_path / "toy.json"
    assert harness.run("toy", bench, out, device="cpu", only=["y", "w", "z"]) == 0
    content = json.loads(out.read_text())
    assert content["rows"] == [{"case": "a", "names": ["x", "y", "w", "z"], "failed": {}}]
    assert content["summary"] == {"rows": 1} and "asked" not in content
    with pytest.raises(InputError, match="name another file"):
        harness.run("toy", bench, out, device="cpu", only=["y", "z"])


def test_what_cannot_be_measured_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, said in (
        (["layer", "--out", "x.json"], "measures a GPU"),
        (["layer", "--quick", "--device", "cpu", "--out", "x"], "ends in .json"),
        (["replicas", "--quick", "--device", "cpu", "--out", "x.json"], "torchrun --nproc-per-node 2"),
    ):  # fmt: skip
        assert main([str(tmp_path / word) if word.startswith("x") else word for word in words]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["layer", "--quick", "--device", "cpu", "--out", str(tmp_path / "x.json")]) == 2
    assert "runs on one process" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- the paired loop -----------------------------------------------------------------------------------------------------


def test_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    """The medians' ratio is another number: a slow round must not count for one contender alone."""
    timings = Timings(
        {"frozen": Timing("frozen", [1.0, 10.0, 4.0]), "a": Timing("a", [2.0, 20.0, 4.0]), "b": Timing("b", error="x")}
    )
    assert (
        timings.ratio("a", "frozen") == 2.0 != statistics.median([2.0, 20.0, 4.0]) / statistics.median([1.0, 10.0, 4.0])
    )
    assert timings.ratio("b", "frozen") is timings.ratio("a", "missing") is None
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert geomean([1.0, None]) is geomean([]) is layers.least([1.0, None]) is None, "no mean over fewer cases"


def test_every_contender_runs_once_in_each_round_in_changing_order_with_gradients_cleared() -> None:
    log: list[str] = []
    works = {name: Work(lambda name=name: log.append(name), lambda: log.append("-")) for name in "abcd"}  # type: ignore[misc]
    timings = paired([Contender(name, lambda own=own: own) for name, own in works.items()], CPU, 0, (12, 12), 3)  # type: ignore[misc]
    ran = [what for what in log if what != "-"]
    rounds = [tuple(ran[start : start + 4]) for start in range(12, len(ran), 4)]
    assert ran[:12] == [name for name in "abcd" for _ in range(3)] and len(rounds) == 2 + 12
    assert all(sorted(turn) == [*"abcd"] for turn in rounds) and len(set(rounds)) > 3
    assert all(len(timing.ms) == len(timing.host_us) == 12 for timing in timings.by_name.values())
    assert all(log[at - 1] == "-" for at, what in enumerate(log) if what != "-"), "cleared before each run"


@pytest.mark.parametrize("when", ["make", "warmup", "loop"])
def test_a_contender_that_fails_is_recorded_cleared_and_the_others_go_on(when: str) -> None:
    runs, left = 0, False

    def make() -> Work:
        if when == "make":
            raise ImportError("no such thing")

        def step() -> None:
            nonlocal runs, left
            runs, left = runs + 1, True
            if when == "warmup" or runs > 5:
                raise RuntimeError("no such thing")

        return Work(step, clear)

    def clear() -> None:
        nonlocal left
        left = False

    def needs_clean() -> None:
        assert not left, "what another left is accumulated onto"

    good = Work(needs_clean, clear)
    made = [Contender("frozen", lambda: good), Contender("broken", make), Contender("good", lambda: good)]
    row = row_of(paired(made, CPU, seconds=0, rounds=(6, 6)))
    assert list(row["failed"]) == ["broken"] and "no such thing" in row["failed"]["broken"]
    assert sorted(row["ms"]) == ["frozen", "good"] and set(row["over_frozen"]) == {"good"} and row["rounds"] == 6


def test_gpu_runs_lie_between_events_after_a_flush_and_nothing_waits_inside_the_loop(monkeypatch: Any) -> None:
    """A stand-in takes torch.cuda's place, as this machine may have no GPU."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 1.5

    class Scratch:
        def fill_(self, value: int) -> None:
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    timings = Timings({"a": Timing("a"), "b": Timing("b")})
    works = {name: Work(lambda: log.append("step"), nothing) for name in ("a", "b")}
    timing._rounds(works, timings, torch.device("cuda"), 3, Scratch(), random.Random(0))  # type: ignore[arg-type]
    assert log == ["flush", "event", "step", "event"] * 6 + ["wait"]
    assert timings.by_name["a"].ms == [1.5] * 3


def test_values_change_once_between_two_runs_however_often_gradients_are_dropped() -> None:
    parameters = [torch.randn(3, 5), torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(4)]
    before = [parameter.clone() for parameter in parameters]
    work = stepped(Work(nothing, nothing), parameters)
    for changed in (True, False):
        work.step()
        work.clear()
        work.clear()
        same = [torch.equal(now, old) for now, old in zip(parameters, before, strict=True)]
        assert same == ([False, False, True] if changed else [True, True, True])


# --- contenders ----------------------------------------------------------------------------------------------------------


def test_a_stepped_contender_makes_its_norms_anew_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    right = norms.row_norms
    monkeypatch.setattr(
        norms, "row_norms", lambda problems, *rest, **more: computed.append(1) or right(problems, *rest, **more)
    )
    inputs = contenders.Inputs.random(64, 96, 32, 8, 0.0, CPU, dora=True)
    for name, every in (("operator", False), ("operator_stepped", True)):
        work = contenders.layer_work(name, inputs)
        for number in range(3):
            computed.clear()
            work.step()
            work.clear()
            assert number == 0 or bool(computed) == every, name


def test_a_wrong_result_and_a_layer_that_packlora_leaves_to_peft_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = contenders.Inputs.random(64, 96, 32, 8, 0.0, CPU)
    for tensor in (inputs.x, inputs.dy, inputs.weight_NK, inputs.A_rK, inputs.B_Nr):
        assert tensor.is_contiguous() and 0 not in tensor.stride() and (tensor == 0).float().mean() < 0.01
    _, right, own = contenders.peft_layer(inputs.weight_NK, inputs.factors, 0.0, wide=False)
    _, wrong, theirs = contenders.peft_layer(inputs.weight_NK, (inputs.A_rK, inputs.B_Nr * 1.5), 0.0, wide=False)
    contenders.check_close(right, own, right, own, inputs.x, inputs.dy)
    with pytest.raises(AssertionError, match=r"y differs from PEFT's by"):
        contenders.check_close(wrong, theirs, right, own, inputs.x, inputs.dy)
    model, one, _ = contenders.peft_layer(inputs.weight_NK, inputs.factors, 0.0, wide=False)
    one.linear.forward = one.linear.forward  # type: ignore[method-assign]  # other code's
    with pytest.raises(AssertionError, match=r"(?s)not all modules were accelerated.*replaced by other code"):
        contenders.accelerated("packlora", model, {"x": inputs.x})

    def scaled(name: str, model: torch.nn.Module) -> None:
        """A stand-in for a project's kernels: PEFT's own, o_proj a thousandth too large."""
        model.out.register_forward_hook(lambda module, args, y: y * 1.001)

    monkeypatch.setattr(peer_block, "use_peer", scaled)
    right_of = peer_block.Right(peer_block.Data(CPU), case("block", dora=False))
    with pytest.raises(AssertionError, match="is rounding"):
        right_of.check("axolotl")


def test_plain_operations_are_what_the_operator_computes() -> None:
    """Two jobs of different modules and tokens of nobody, output and all gradients; and both take turns on one model."""
    torch.manual_seed(5)
    model: Any = tiny_model("llama").double()
    configs = {"a": LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
               "b": LoraConfig(r=5, lora_alpha=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}  # fmt: skip
    attached, adapters = attach(model, {name: resolve(own, model, name) for name, own in configs.items()}, 0)
    ids, parameters = torch.randint(0, 60, (1, 23)), [p for one in adapters for p in one.named_parameters().values()]

    def run() -> list[torch.Tensor]:
        with attached.active(TokenOwners(23, ((0, 1, 8), (1, 8, 20)))):
            y = model(input_ids=ids, use_cache=False).logits
            return [y.detach(), *torch.autograd.grad(y.square().sum(), parameters)]

    ours = run()
    with eager.eager(model):
        torch.testing.assert_close(run(), ours, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run(), ours, rtol=0, atol=0)


@pytest.mark.parametrize("tier", ["eager", "kernel"])
def test_scaling_dora_s_composition_is_its_formula(tier: Any) -> None:
    for shape in ((3, 5), (130, 64), (9, 1100)):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        base, lora, d = (torch.randn(shape, device=device) for _ in range(3))
        g, s = 1 + 0.3 * torch.randn(shape[1], device=device), 0.7
        leaves = [tensor.clone().requires_grad_() for tensor in (base, lora, g)]
        out = compose(*leaves, s, tier)  # type: ignore[misc]
        z = base.double() + s * lora.double()
        exact = [g * z - base, ((g - 1) * d).double(), (g * s * d).double(), (d * z).sum(0)]
        for own, right in zip([out.detach(), *torch.autograd.grad(out, leaves, d)], exact, strict=True):
            torch.testing.assert_close(own.double(), right, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match=r"base \(9, 1100\), lora \(9, 1100\) and g \(5,\)"):
        compose(base, lora, g[:5], 1.0)


def test_sources_are_fetched_once_at_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The source is a repository on this disk whose newest commit is another one."""
    repository = tmp_path / "repository"
    (repository / "src" / "name").mkdir(parents=True)

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for number in (1, 2):
        (repository / "src" / "name" / "kernel.py").write_text(f"VALUE = {number}\n")
        git("add", "-A")
        git("commit", "-q", "-m", f"{number}")
    commit = git("rev-parse", "HEAD~1")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SOURCES", {"name": sources.Source(repository.as_uri(), commit, ("src/name",), "src")})
    for _ in range(2):
        assert (sources.fetched("name") / "name" / "kernel.py").read_text() == "VALUE = 1\n"
    assert capsys.readouterr().out.count("fetching") == 1
    monkeypatch.setattr(sources, "SOURCES", {"name": sources.Source(repository.as_uri(), "0" * 40, ("src/name",))})
    with pytest.raises(InputError, match=r"^name cannot be fetched from .*put src/name of commit 0{40} into"):
        sources.fetched("name")


# --- commands --------------------------------------------------------------------------------------------------------------


def test_where_the_time_of_a_command_went_adds_up() -> None:
    seconds = [9.0, 1.0, 1.0, 4.0, 1.0, 0.5, 1.0]
    ends = [sum(seconds[: at + 1]) for at in range(len(seconds))]
    lines: list[dict[str, Any]] = [{"elapsed": end, "tokens": {"a": 60, "b": 40}, "predicted": 0.9} for end in ends]
    result = {"seconds": ends[-1] + 2.0, "tokens": 700, "peak_memory_bytes": 2**31}
    row = commands.where_time_went(30.0, result, lines)
    assert [row[key] for key in ("first_microbatch_s", "stalls_s", "end_s", "median_microbatch_s")] == [
        9.0,
        3.0,
        2.0,
        1.0,
    ]
    assert row["before_training_s"] == 30.0 - 19.5 and row["between_stalls_tokens_per_s"] == pytest.approx(500 / 4.5)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["anchors", "command"])
def test_commands_run_at_toy_sizes(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.json"
    assert main([name, "--quick", "--device", "cpu", "--out", str(out)]) == 0
    assert all(row["tokens_per_s"] > 0 for row in json.loads(out.read_text())["rows"])


@pytest.mark.soak
def test_a_large_model_is_trained_and_served_at_toy_sizes_and_goes_on_after_kills(tmp_path: Path) -> None:
    out = tmp_path / "large.json"
    assert main(["large", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(row["tokens_per_s"] > 0 and row["host_gib"] > 0 for name, row in rows.items() if name != "resumed")
    assert rows["resumed"]["loss_difference"] < 2**-9, "half a step of bfloat16"
    served = rows["served"]
    assert len(served["losses"]) == 4 and served["resumed_on"] == 1
    assert 10 * served["loss_difference"] < served["loss_change"], "three steps change it, and none was lost"


def test_a_service_that_takes_too_long_is_killed_and_its_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []

    def hanging(folder: Path, state: Path, device: str, processes: int, settings: Any, watch: Any) -> None:
        state.with_suffix(".log").write_text("it starts")
        process = subprocess.Popen(["sleep", "20"])
        watch(process.pid)
        codes.append(process.wait())
        raise RuntimeError("it does not answer")

    monkeypatch.setattr(large_served, "Served", hanging)
    monkeypatch.setattr(large_served, "LIMIT", 0.4)
    row = large_served.served(tmp_path, 2, 8, 32, 0, torch.device("cpu"))
    assert codes == [-9] and row["losses"] == [] and row["host_gib"] > 0
    assert row["failed"] == {"packlora": "killed after 0 s: RuntimeError: it does not answer"}


def test_a_process_is_killed_with_all_that_it_has_started() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 20 & sleep 20 & wait"]) as process:
        wait_for(lambda: len(watched.descendants(process.pid)) == 3)
        found = watched.descendants(process.pid)
        watch = watched.Watch(process.pid, lambda: True)
        assert process.wait() == -9
        watched.wait_until_gone(found)
        watch.end()
    assert not any(map(watched.own_memory, found)) and watch.most > 0


@pytest.mark.soak
def test_seconds_until_a_refusal_and_a_first_step_are_measured(tmp_path: Path) -> None:
    assert main(["start", "--quick", "--device", "cpu", "--out", str(tmp_path / "start.json")]) == 0
    summary = json.loads((tmp_path / "start.json").read_text())["summary"]
    assert 0 < summary["part_bad_path_s"] < summary["part_first_step_s"] and summary["part_bad_line_s"] > 0


@pytest.mark.soak
def test_the_service_is_measured_at_toy_sizes(tmp_path: Path) -> None:
    assert main(["serve", "--quick", "--device", "cpu", "--out", str(tmp_path / "serve.json")]) == 0
    summary = json.loads((tmp_path / "serve.json").read_text())["summary"]
    keys = ("mixed_vs_sequential", "mixed_vs_sequential_250", "mixed_vs_set_adapter", "one_tenant_over_train",
            "idle_models_tokens_per_s", "p50_small_over_compute")  # fmt: skip
    assert all(summary[f"part_{key}"] > 0 for key in keys) and "part_idle_models_gib" in summary
