"""`python -m benchmarks`: figures computed right, every contender accounted for, and every benchmark run once at toy sizes."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import graphs, layer, model, multi, progress, traffic
from benchmarks.options import Options, choose, plan_from_name
from benchmarks.peers.peft import peft_model
from benchmarks.progress import Progress
from benchmarks.results import rows_of_other_parts, write_results
from benchmarks.run import run_bench
from benchmarks.studies import model_profile
from benchmarks.tables import result_files, sections
from benchmarks.tables import write as readme
from packlora.errors import InputError
from packlora.ops.lora_linear.plan import CHAIN, PLANS, ROUTED, Plan
from packlora.plans import timing
from packlora.plans.timing import Contender, Timing, Timings, Work, geomean, paired
from packlora.runtime.record import device_name

CPU = torch.device("cpu")
REQUIRED = {
    "layer": ["over_frozen_T8192_geomean", "over_frozen_T2048_geomean", "worst_vs_peft"],
    "multi": ["over_frozen_T8192_geomean"],
    "graphs": ["llama60m_over_frozen", "llama250m_over_frozen", "llama1_3b_over_frozen"],
    "model": [
        "lora_r16_over_frozen", "lora_r16_ckpt_over_frozen", "lora_r16_gib", "lora_r16_ckpt_gib", "frozen_ms", "frozen_ckpt_ms",
        "dora_r384_over_frozen", "dora_r384_ckpt_over_frozen", "dora_r384_gib", "dora_r384_ckpt_gib",
    ],
}  # fmt: skip
"""Keys that others read: README, and whoever compares two commits."""


def nothing() -> None:
    pass


def on_gpu(**changes: Any) -> Options:
    """Options as on a machine with a GPU; nothing is run with them."""
    return Options(torch.device("cuda"), **changes)


# --- figures -----------------------------------------------------------------------------------------------------------


def test_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    draw = random.Random()
    frozen = [draw.uniform(1, 2) for _ in range(9)]
    slower = [value * draw.uniform(1, 9) for value in frozen]
    timings = Timings({"frozen": Timing("frozen", frozen), "a": Timing("a", slower), "b": Timing("b", error="broke")})
    ratios = sorted(a / b for a, b in zip(slower, frozen, strict=True))
    assert timings.ratio("a", "frozen") == ratios[4]
    assert timings.ratio("b", "frozen") is None
    assert timings.ratio("a", "missing") is None
    # the medians' ratio is another number: a slow round must not count for one contender alone
    timings = Timings({"frozen": Timing("frozen", [1.0, 10.0, 4.0]), "a": Timing("a", [2.0, 20.0, 4.0])})
    of_medians = statistics.median([2.0, 20.0, 4.0]) / statistics.median([1.0, 10.0, 4.0])
    assert timings.ratio("a", "frozen") == 2.0 != of_medians


def test_geomean_is_missing_where_a_value_is() -> None:
    values = [random.uniform(0.5, 2) for _ in range(5)]
    product = 1.0
    for value in values:
        product *= value
    assert geomean(values) == pytest.approx(product ** (1 / 5))
    assert geomean([1.0, None, 2.0]) is None
    assert geomean([]) is None


def timed_rows(bench: Any, cases: list[Any], ms: dict[str, float], fail: str | None = None) -> list[dict[str, Any]]:
    """Rows as `run` makes them, each contender `ms` times the case's number slower."""
    rows = []
    for number, case in enumerate(cases, 1):
        made = {
            name: Timing(name, [value * (number if name != "frozen" else 1)] * 3, [1.0] * 3, 0, 2**30)
            for name, value in ms.items()
        }
        if number == len(cases) and fail is not None:
            made[fail] = Timing(fail, error="broke")
        timings = Timings(made)
        row = {"case": case.label, **timings.row()}
        if bench in (layer, multi):
            row |= {"K": case.K, "N": case.N, "T": case.T, "main": getattr(case, "main", True), "sweep": False}
            own = [name for name in made if name.startswith("packlora")]
            peers = [name for name in made if name.startswith("peft")]
            row["vs_peft"] = {name: {peer: timings.ratio(peer, name) for peer in peers} for name in own}
        else:
            row |= {"gib": model.peak_gib(timings, 2**30)}
        if bench is model:
            row |= {"kind": case.kind, "shape": case.shape, "T": case.samples * case.length}
            row |= {"checkpointing": case.checkpointing, "dora": case.dora}
        rows.append(row)
    return rows


MS = {
    "frozen": 2.0, "packlora": 2.2, "packlora_fp32": 2.4, "packlora_merged": 2.3, "peft_bf16": 3.0,
    "peft_fp32_autocast": 6.0, "peft_compiled": 2.5,
}  # fmt: skip
BENCHES: dict[str, Any] = {"layer": layer, "multi": multi, "graphs": graphs, "model": model}
"""dora, which has rows of several kinds, is in test_bench_dora.py."""


@pytest.mark.parametrize("name", BENCHES)
def test_summary_of_a_whole_benchmark_has_the_required_keys(name: str) -> None:
    bench = BENCHES[name]
    summary = bench.summary(timed_rows(bench, bench.cases(on_gpu()), MS))
    assert on_gpu().keys(summary) == summary
    for key in REQUIRED[name]:
        assert isinstance(summary[key], float), key
    part = on_gpu(quick=True).keys(summary)
    assert not set(part) & set(REQUIRED[name]), "a part of a benchmark must not look like the whole"


def test_layer_summary_on_known_times() -> None:
    cases = [c for c in layer.cases(on_gpu()) if c.main and c.T == 8192]
    assert [(c.K, c.N) for c in cases] == layer.SHAPES
    rows = timed_rows(layer, cases, MS)
    summary = layer.summary(rows)
    assert summary["over_frozen_T8192_geomean"] == pytest.approx(1.1 * (1 * 2 * 3 * 4 * 5) ** 0.2)
    assert summary["over_frozen_T8192_geomean_peft_bf16"] == pytest.approx(1.5 * (1 * 2 * 3 * 4 * 5) ** 0.2)
    assert summary["worst_vs_peft"] == pytest.approx(2.5 / 2.2), "the fastest peer counts, not the slowest"
    assert summary["worst_fp32_vs_peft_fp32"] == pytest.approx(6.0 / 2.4)
    rows[3]["vs_peft"]["packlora"]["peft_bf16"] = 0.9
    assert layer.summary(rows)["worst_vs_peft"] == 0.9
    assert layer.summary(rows)["worst_vs_peft_case"] == rows[3]["case"]
    assert layer.table(rows)[-1] == f"worst case against the best PEFT: {rows[3]['case']}, 0.900x"


def test_ratios_with_the_host_ahead_stand_beside_the_others_where_they_were_measured() -> None:
    rows = timed_rows(layer, [c for c in layer.cases(on_gpu()) if c.main and c.T == 8192], MS)
    assert not any(key.startswith("ahead") for key in layer.summary(rows))
    for row in rows:
        row["ahead_over_frozen"] = {name: 1.05 if name == "packlora" else 1.25 for name in row["over_frozen"]}
    summary = layer.summary(rows)
    assert summary["ahead_over_frozen_T8192_geomean"] == pytest.approx(1.05)
    assert summary["ahead_over_frozen_T8192_geomean_peft_bf16"] == pytest.approx(1.25)
    assert summary["over_frozen_T8192_geomean"] == pytest.approx(1.1 * (1 * 2 * 3 * 4 * 5) ** 0.2)
    assert "(1.100, 1.050)" in layer.progress_line(rows[0])


def test_figures_over_a_failed_case_are_missing_and_not_flattered() -> None:
    cases = [c for c in layer.cases(on_gpu()) if c.main]
    rows = timed_rows(layer, cases, MS, fail="packlora")
    summary = layer.summary(rows)
    assert summary["over_frozen_T2048_geomean"] is not None
    assert summary["over_frozen_T8192_geomean"] is None
    assert summary["worst_vs_peft"] is None
    assert "FAILED: broke" in layer.progress_line(rows[-1])
    without = timed_rows(layer, cases, MS, fail="frozen")[0]
    without["over_frozen"] = {"packlora": None}
    without["ahead_over_frozen"] = {"packlora": None}
    assert "packlora 2.200 ms |" in layer.progress_line(without)


def test_memory_of_a_contender_counts_its_own_and_the_weights() -> None:
    timings = Timings({"a": Timing("a", [1.0], [1.0], own_bytes=2**28, peak_bytes=2**30), "b": Timing("b", error="x")})
    assert model.peak_gib(timings, 2**31) == {"a": 3.25}


# --- a run that is ended ----


def test_a_run_that_was_ended_goes_on_at_the_case_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, measured = tmp_path / "layer-cpu.json", []
    real = layer.paired

    def paired_until(end: int) -> Any:
        def paired(*args: Any, **kwargs: Any) -> Any:
            if len(measured) == end:
                raise KeyboardInterrupt
            measured.append(1)
            return real(*args, **{**kwargs, "seconds": 0, "rounds": (2, 2), "warmup": 1})

        return paired

    monkeypatch.setattr(layer, "paired", paired_until(2))
    with pytest.raises(KeyboardInterrupt):
        run_bench("layer", out, quick=True, device="cpu")
    assert not out.exists()
    with pytest.raises(InputError, match="remove it to begin anew"):
        run_bench("layer", out, quick=True, device="cpu", only="frozen,packlora", resume=True)

    monkeypatch.setattr(layer, "paired", paired_until(99))
    assert run_bench("layer", out, quick=True, device="cpu", resume=True) == 0
    labels = [case.label for case in layer.cases(Options(CPU, quick=True))]
    assert len(labels) == len(measured) == 3, "no case twice"
    assert capsys.readouterr().out.count("measured already") == 2
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == labels
    assert ["measured" in row for row in rows] == [True, True, False]
    assert list(tmp_path.iterdir()) == [out]

    assert run_bench("layer", out, quick=True, device="cpu") == 0
    assert len(measured) == 6, "without --resume all of it is measured"


def test_a_run_whose_time_is_up_begins_no_case_and_writes_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, clock, real = tmp_path / "layer-cpu.json", itertools.count(0, 2), layer.paired
    few = {"seconds": 0, "rounds": (2, 2), "warmup": 1}
    monkeypatch.setattr(layer, "paired", lambda *args, **kwargs: real(*args, **{**kwargs, **few}))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    labels = [case.label for case in layer.cases(Options(CPU, quick=True))]
    assert len(labels) == 3
    assert run_bench("layer", out, quick=True, device="cpu", seconds=3) == 0
    assert f"1 cases are not measured, {labels[2]} is the next" in capsys.readouterr().out
    file = json.loads(out.read_text())
    assert [row["case"] for row in file["rows"]] == labels[:2] and file["not_measured"] == labels[2:]
    assert run_bench("layer", out, quick=True, device="cpu", seconds=1, resume=True) == 0, "a first case always begins"
    file = json.loads(out.read_text())
    assert [row["case"] for row in file["rows"]] == labels and "not_measured" not in file
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(InputError, match="--seconds is for benchmarks of one process"):
        run_bench("schedule", out, seconds=1)


def test_figures_of_a_run_whose_time_was_up_are_no_whole_benchmark_s(tmp_path: Path) -> None:
    ended = Progress(tmp_path / "x.json", {}, resume=False)
    assert Options(CPU, progress=ended).keys({"mean": 1.0}) == {"mean": 1.0}
    ended.left.append("a case")
    options = Options(CPU, progress=ended)
    assert options.keys({"mean": 1.0}) == {"part_mean": 1.0}
    assert options.keys({"of_a": 1.0}, by_case=True) == {"of_a": 1.0}
    row = {"case": "b", "part": "other", "failed": {}}
    write_results(tmp_path / "x.json", "x", "how", [row], {"part_mean": 1.0}, "cpu", ["a case"])
    name = device_name(CPU)
    with pytest.raises(InputError, match="--seconds; name another file"):
        rows_of_other_parts(tmp_path / "x.json", "x", name, ["layers"], lambda row: str(row["part"]))
    kept = rows_of_other_parts(tmp_path / "x.json", "x", name, ["layers"], lambda row: str(row["part"]), resume=True)
    assert [row["case"] for row in kept] == ["b"]


def test_cases_in_which_something_failed_are_measured_again(tmp_path: Path) -> None:
    out, asked = tmp_path / "x.json", {"name": "x"}
    cases = layer.cases(Options(CPU, quick=True))
    rows: list[dict[str, Any]] = []
    for case in Progress(out, asked, resume=False).each(cases, rows):
        rows.append({"case": case.label, "failed": {"packlora": "broke"} if case is cases[1] else {}})
    rows = []
    again = Progress(out, asked, resume=True)
    todo = []
    for case in again.each(cases, rows):
        todo.append(case)
        rows.append({"case": case.label, "failed": {}})
    assert todo == [cases[1]] and [row["case"] for row in rows] == [case.label for case in cases]
    Progress(out, asked, resume=False).done()
    assert again.path.exists(), "another run's"
    again.done()
    assert not again.path.exists()


def test_the_scheduler_s_benchmark_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--resume is not for it"):
        run_bench("schedule", tmp_path / "s.json", quick=True, resume=True)
    assert not list(tmp_path.iterdir())


def test_progress_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    for text in ("", "[]", '{"asked": {}}', '{"asked": {}, "commit": "c", "date": "d", "rows": [{}]}'):
        (tmp_path / "x.part.json").write_text(text)
        with pytest.raises(InputError, match="cannot go on with"):
            Progress(out, {}, resume=True)
        assert Progress(out, {}, resume=False).rows == {}


# --- the paired loop ---------------------------------------------------------------------------------------------------


def test_every_contender_runs_once_in_each_round_in_changing_order() -> None:
    ran: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(name, lambda: Work(lambda: ran.append(name), nothing))

    names = ["a", "b", "c", "d"]
    timings = paired([contender(name) for name in names], CPU, seconds=0, rounds=(12, 12), warmup=3)
    assert ran[:12] == [name for name in names for _ in range(3)], "warm-up, one after the other"
    rounds = [tuple(ran[start : start + 4]) for start in range(12, len(ran), 4)]
    assert len(rounds) == 2 + 12
    assert all(sorted(turn) == names for turn in rounds)
    assert len(set(rounds)) > 3
    assert all(len(timing.ms) == len(timing.host_us) == 12 for timing in timings.by_name.values())


def test_gradients_are_cleared_before_every_run_and_outside_the_clock() -> None:
    log: list[str] = []
    work = Work(lambda: log.append("step"), lambda: log.append("clear"))
    paired([Contender("a", lambda: work)], CPU, seconds=0, rounds=(4, 4), warmup=2)
    before = [log[index - 1] for index, what in enumerate(log) if what == "step"]
    assert before == ["clear"] * len(before) and len(before) == 2 + 2 + 4


@pytest.mark.parametrize("when", ["make", "warmup", "loop"])
def test_a_contender_that_fails_is_recorded_and_the_others_go_on(when: str) -> None:
    runs = 0

    def make() -> Work:
        if when == "make":
            raise ImportError("no such thing")

        def step() -> None:
            nonlocal runs
            runs += 1
            if when == "warmup" or runs > 5:
                raise RuntimeError("no such thing")

        return Work(step, nothing)

    work = Work(nothing, nothing)
    contenders = [Contender("frozen", lambda: work), Contender("broken", make), Contender("good", lambda: work)]
    timings = paired(contenders, CPU, seconds=0, rounds=(6, 6))
    row = timings.row()
    assert list(row["failed"]) == ["broken"]
    assert "no such thing" in row["failed"]["broken"]
    assert sorted(row["ms"]) == ["frozen", "good"]
    assert row["rounds"] == 6
    assert set(row["over_frozen"]) == {"good"}


def test_what_a_failed_contender_leaves_is_cleared_before_the_next_one_runs() -> None:
    """They share the input and so its gradient, which would be accumulated onto."""
    left = False
    runs = 0

    def clear() -> None:
        nonlocal left
        left = False

    def breaks() -> None:
        nonlocal left, runs
        left, runs = True, runs + 1
        if runs > 6:
            raise RuntimeError("broke")

    def needs_clean() -> None:
        assert not left

    contenders = [Contender("broken", lambda: Work(breaks, clear)), Contender("good", lambda: Work(needs_clean, clear))]
    for seed in range(4):  # either order
        runs = 0
        timings = paired(contenders, CPU, seconds=0, rounds=(4, 4), seed=seed)
        assert timings.by_name["broken"].error is not None
        assert timings.by_name["good"].error is None


def test_rounds_fill_the_time_within_their_bounds() -> None:
    import time

    slow = Contender("slow", lambda: Work(lambda: time.sleep(0.005), nothing))
    assert 5 <= len(paired([slow], CPU, seconds=0.1, rounds=(2, 50)).by_name["slow"].ms) <= 21
    assert len(paired([slow], CPU, seconds=9.0, rounds=(2, 4)).by_name["slow"].ms) == 4
    with pytest.raises(ValueError, match="must differ"):
        paired([slow, slow], CPU)


def test_gpu_runs_lie_between_events_after_a_flush_and_nothing_waits_inside_the_loop(monkeypatch: Any) -> None:
    """On a stand-in for torch.cuda, as this machine may have no GPU."""
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


# --- inputs ------------------------------------------------------------------------------------------------------------


def test_layer_inputs_are_random_and_dense() -> None:
    inputs = layer.Inputs.random(layer.Case(64, 96, 32), CPU)
    for tensor in (inputs.x, inputs.dy, inputs.weight_NK, inputs.A_rK, inputs.B_Nr):
        assert tensor.is_contiguous() and 0 not in tensor.stride()
        assert (tensor == 0).float().mean() < 0.01
        assert tensor.float().std() > 0
    assert inputs.x.requires_grad and not inputs.weight_NK.requires_grad


def test_peft_layer_holds_the_given_adapter_in_the_asked_type() -> None:
    inputs = layer.Inputs.random(layer.Case(64, 96, 32, rank=4, dropout=0.0), CPU)
    for wide in (False, True):
        _, one, parameters = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr, 0.0, wide)
        assert [p.dtype for p in parameters] == [torch.float32 if wide else torch.bfloat16] * 2
        W, A, B = (t.detach().double() for t in (inputs.weight_NK, inputs.A_rK, inputs.B_Nr))
        expected = inputs.x.detach().double() @ (W + 2.0 * B @ A).T
        assert (one(inputs.x) - expected).norm() / expected.norm() < 0.01


def test_a_wrong_result_is_not_timed(monkeypatch: Any) -> None:
    inputs = layer.Inputs.random(layer.Case(64, 96, 32, dropout=0.0), CPU)
    wrong, _, parameters = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr * 1.5, 0.0, wide=False)
    with pytest.raises(AssertionError, match=r"y differs from PEFT's by"):
        layer.compare_with_peft(wrong, parameters, inputs)
    right, _, parameters = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr, 0.0, wide=False)
    layer.compare_with_peft(right, parameters, inputs)


@pytest.mark.parametrize("T", [96, 2048, 8192])
def test_runs_of_the_adapters_cover_all_tokens_raggedly(T: int) -> None:
    runs = multi.boundaries(T)
    assert runs[0][0] == 0 and runs[-1][1] == T
    assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
    assert all(stop % 2 == 1 and stop > start for start, stop in runs[:-1])


def test_models_of_a_case_share_their_frozen_weights_and_nothing_else() -> None:
    config = model.cases(Options(CPU, quick=True))[0].config
    base = model.build(config, CPU, model.LlamaForCausalLM)
    adapted, _ = model.adapted_copy("peft_bf16", base, 4, 0.0)
    assert [name for name, _ in base.named_parameters() if "lora" in name] == []
    theirs = {id(parameter) for parameter in adapted.parameters()}
    assert {id(parameter) for parameter in base.parameters()} <= theirs
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * config.num_hidden_layers
    assert all(parameter.abs().sum() > 0 for parameter in trained)


def test_a_module_that_packlora_leaves_to_peft_is_not_timed_as_packlora() -> None:
    inputs = layer.Inputs.random(layer.Case(64, 96, 32), CPU)
    made, _, _ = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr, 0.0, wide=False)
    told = layer.accelerated("packlora:mm/before-mm/before", made, {"x": inputs.x})
    assert told.startswith("plan mm/before-mm/before,")
    made, _, _ = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr, 0.0, wide=False)
    made.base_model.model.linear.forward = made.base_model.model.linear.forward  # other code's
    with pytest.raises(AssertionError, match=r"(?s)not all modules were accelerated.*replaced by other code"):
        layer.accelerated("packlora", made, {"x": inputs.x})


# --- what can be asked for ---------------------------------------------------------------------------------------------


def test_only_chooses_contenders_and_cases() -> None:
    cases = layer.cases(on_gpu())
    names, chosen = choose(["packlora", "T8192", "p0.1", "4096x4096", "8192x8192"], layer.CONTENDERS, [], cases)
    assert names == ["frozen", "packlora"]
    assert {(c.K, c.T, c.dropout) for c in chosen} == {(4096, 8192, 0.1), (8192, 8192, 0.1)}
    names, chosen = choose(["packlora:routed/routed-one-pass/routed"], layer.CONTENDERS, [], cases)
    assert names == ["frozen", "packlora:routed/routed-one-pass/routed"] and chosen == cases
    with pytest.raises(InputError, match=r"'T1234' is neither a contender \(frozen, .* nor a word of a case"):
        choose(["T1234"], layer.CONTENDERS, [], cases)
    with pytest.raises(InputError, match="no case has all of 14336x4096, r384"):
        choose(["14336x4096", "r384"], layer.CONTENDERS, [], cases)


@pytest.mark.parametrize(
    "plan", [CHAIN, ROUTED, Plan(up="merged", dx="merged"), Plan(dA="xd", dB="xd", keep_s=False), Plan(grad="one-pass")]
)
def test_a_plan_is_found_by_its_name(plan: Plan) -> None:
    assert plan_from_name(plan.name) == plan


def test_a_plan_of_the_list_is_found_by_its_short_name_and_by_its_parts() -> None:
    for named in PLANS:
        assert plan_from_name(named.name) == plan_from_name(named.plan.name) == named.plan


@pytest.mark.parametrize(
    "name", ["fast", "mm/after-mm", "mm/after-mm/often", "mm/after-mm/after+dC:xd", "mm/after-mm/after+dA:S"]
)
def test_an_unknown_plan_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match="plan '"):
        plan_from_name(name)


def test_bad_requests_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out.json"
    with pytest.raises(InputError, match="'lora' is not a benchmark; there are layer, multi, graphs, model"):
        run_bench("lora", out)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cpu"):
        with pytest.raises(InputError, match=r"bench layer measures a GPU.*--quick --device cpu"):
            run_bench("layer", out, device=device)
    with pytest.raises(InputError, match="layers is for model"):
        run_bench("layer", out, quick=True, device="cpu", layers=2)
    with pytest.raises(InputError, match="is a folder"):
        run_bench("layer", tmp_path, quick=True, device="cpu")
    with pytest.raises(InputError, match=r"must end in \.json"):
        run_bench("layer", tmp_path / "out", quick=True, device="cpu")
    assert list(tmp_path.iterdir()) == []


# --- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_runs_at_toy_sizes(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    bench = BENCHES[name]
    quick = lambda *args, **options: paired(*args, **{**options, "seconds": 0, "rounds": (2, 2), "warmup": 1})  # noqa: E731
    monkeypatch.setattr(bench, "paired", quick)
    out = tmp_path / "folder" / f"{name}.json"
    code = run_bench(name, out, quick=True, device="cpu", plots=True)
    printed = capsys.readouterr()
    content = json.loads(out.read_text())
    assert code == 0, printed.err
    assert content["name"] == f"{name}-cpu"
    assert content["protocol"] and content["versions"]["torch"]
    for row in content["rows"]:
        assert row["failed"] == {}
        assert set(row["ms"]) == set(bench.CONTENDERS)
        assert set(row["over_frozen"]) == set(bench.CONTENDERS) - {"frozen"}
        assert row["rounds"] == 2
        assert set(row["notes"]) == {name for name in bench.CONTENDERS if name.startswith("packlora")}
        if row["case"].startswith(("model", "layer", "tiny")):
            layers = 1 if row["case"].startswith("layer") else 2
            assert f" {5 * layers} of {7 * layers} modules in sibling groups" in row["notes"]["packlora"]
    assert content["summary"] and all(key.startswith("part_") for key in content["summary"])
    assert all(line in printed.out for line in bench.table(content["rows"]))


def test_a_failure_is_written_printed_and_turns_the_exit_code(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of kernels")

    monkeypatch.setattr(layer, "accelerate", broken)
    out = tmp_path / "layer.json"
    assert run_bench("layer", out, quick=True, device="cpu", only="packlora,peft_bf16,T32") == 1
    row = json.loads(out.read_text())["rows"][0]
    assert row["failed"] == {"packlora": "RuntimeError: out of kernels"}
    assert set(row["ms"]) == {"frozen", "peft_bf16"}
    assert "packlora: RuntimeError: out of kernels" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHES)
def test_readme_table_of_a_benchmark_shows_its_rows_and_failures(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    bench = BENCHES[name]
    rows = timed_rows(bench, bench.cases(on_gpu()), MS, fail="packlora")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    assert getattr(sections, name)() == [], "no file, no table"
    for row in rows:
        row["r"] = 8
    content = {
        "device": "NVIDIA H200", "commit": "0123456789abcdef", "date": "2026-01-02", "rows": rows,
        "summary": bench.summary(rows),
    }  # fmt: skip
    (results / f"{name}-h200.json").write_text(json.dumps(content))
    lines = getattr(sections, name)()
    table = [line for line in lines if line.startswith("|")]
    shown = [row for row in rows if row.get("main", True)]
    ratios = {f" {row['over_frozen']['packlora']:.2f} " for row in shown if "packlora" not in row["failed"]}
    assert all(any(value in line for line in table) for value in ratios)
    assert any("failed" in line for line in table) == any(row["failed"] for row in shown)
    assert f"{name}-h200.json" in lines[0] and "NVIDIA H200" in lines[0]
    monkeypatch.setattr(readme, "SECTIONS", (sections.layer, sections.multi, sections.graphs, sections.model))
    filled = readme.filled("a\n<!-- figures: here -->\nold\n<!-- /figures -->\nb")
    assert "old" not in filled and filled.startswith("a\n<!-- figures: here -->")
    assert all(line in filled for line in lines if ".json" not in line)
    link = f"[{name}-h200.json](../benchmarks/results/{name}-h200.json)"
    assert f"{link}, commit 0123456, 2026-01-02" in filled, "a figure says of which code it is"
    content["summary"] = on_gpu(quick=True).keys(content["summary"])
    (results / f"{name}-h200.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="holds a part of the benchmark"):
        getattr(sections, name)()


# --- traffic -----------------------------------------------------------------------------------------------------------

RAW = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","byte","byte"
"0","gemm","1,000","24"
"1","other","7","0"
"2","gemm","500","6"
"""
DETAILS = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","gemm","dram__bytes_read.sum","Mbyte","1.5"
"0","gemm","dram__bytes_write.sum","byte","24"
"0","gemm","gpu__time_duration.sum","ns","99"
"""


def test_traffic_is_summed_by_kernel() -> None:
    assert traffic.parse_ncu_csv(RAW.splitlines()) == {"gemm": 1530, "other": 7}
    assert traffic.parse_ncu_csv(DETAILS.splitlines()) == {"gemm": 1_500_024}


def test_traffic_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="no csv of ncu"):
        traffic.parse_ncu_csv(["==ERROR== no permission"])
    with pytest.raises(ValueError, match="lacks a column"):
        traffic.parse_ncu_csv(['"ID","Kernel Name","gpu__time_duration.sum"'])
    with pytest.raises(ValueError, match="holds no kernel"):
        traffic.parse_ncu_csv(RAW.splitlines()[:3])
    with pytest.raises(ValueError, match="unit 'sector'"):
        traffic.parse_ncu_csv(RAW.replace("byte", "sector").replace("dram__sectors", "dram__bytes").splitlines())


def test_traffic_table_is_relative_to_eager_peft(tmp_path: Path) -> None:
    for name, value in (("peft_bf16", 4 * 2**30), ("packlora", 2**30)):
        text = RAW.replace('"1,000","24"', f'"{value}","0"').replace('"7"', '"0"').replace('"500","6"', '"0","0"')
        (tmp_path / f"{name}-4096.csv").write_text(text)
    lines = traffic.traffic_table(sorted(tmp_path.iterdir()))
    assert lines[1].split() == ["4096x4096", "T8192", "packlora", "1.000", "0.250"]
    assert lines[2].split() == ["4096x4096", "T8192", "peft_bf16", "4.000", "1.000"]


def test_ncu_commands_count_every_contender_at_every_width() -> None:
    lines = traffic.commands(Path("counts"))
    assert len(lines) == 1 + 3 * 3 + 1
    assert all(metric in line for line in lines[1:-1] for metric in traffic.METRICS)


def test_ncu_prints_the_commands_and_measures_nothing(tmp_path: Path, capsys: Any) -> None:
    assert run_bench("layer", tmp_path / "layer.json", ncu=True) == 0
    assert capsys.readouterr().out.splitlines() == traffic.commands(tmp_path / "layer-ncu")
    with pytest.raises(InputError, match="ncu is for layer"):
        run_bench("multi", tmp_path / "multi.json", ncu=True)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_sums_kernels_and_waits_by_name() -> None:
    spans = [(100.0, 150.0, "a"), (120.0, 160.0, "b"), (162.0, 200.0, "a"), (230.0, 240.0, "b"), (260.0, 265.0, "a")]
    assert model_profile.summed(spans[::-1]) == {
        "busy_ms": 0.113, "kernels": [["a", 3, 0.093], ["b", 2, 0.05]], "waits": [["b", 1, 0.03], ["a", 1, 0.02]],
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_profile_of_a_model_needs_a_gpu_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no GPU"):
        model_profile.main(["--out", str(tmp_path / "profile.json")])
    assert list(tmp_path.iterdir()) == []
