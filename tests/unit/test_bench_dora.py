"""`benchmarks dora` and its two scripts: peers compute what they should, figures are the rows', parts keep each other's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import dora, dora_compose, dora_layer, dora_model, dora_norm, model
from benchmarks.options import PARTS, Options
from benchmarks.peers import dora as dora_peers
from benchmarks.peers.peft import peft_model
from benchmarks.run import run_bench
from benchmarks.studies import dora_convergence, dora_fidelity, small_updates
from benchmarks.tables import result_files, sections
from packlora.adapters import norms
from packlora.errors import InputError
from packlora.plans.timing import Timing, Timings, paired

CPU = torch.device("cpu")
REQUIRED = [
    *(f"layer_r{rank}_{shape}_over_frozen" for rank in (16, 384) for shape in ("4096", "4096x14336", "8192")),
    "norm_refresh_us", "compose_of_copy_bandwidth", "logit_cosine_min_float32",
    "logit_cosine_16bit_minus_peft", "convergence_over_noise",
]  # fmt: skip
SMALL = ["--device=cpu", "--tiny", "--seeds=2", "--batch=2", "--length=40", "--rows=6", "--rank=4"]
"""A run of dora_convergence in seconds."""
TIMED = (dora_norm, dora_compose, dora_layer, dora_model, model)


def on_gpu(**changes: Any) -> Options:
    """Options as on a machine with a GPU; nothing is run with them."""
    return Options(torch.device("cuda"), **changes)


@pytest.fixture
def quick(monkeypatch: Any) -> None:
    """Two rounds, whatever a part asks for."""

    def two_rounds(*args: Any, **options: Any) -> Timings:
        return paired(*args, **{**options, "seconds": 0, "rounds": (2, 2), "warmup": 1})

    for bench in TIMED:
        monkeypatch.setattr(bench, "paired", two_rounds)


def operands(N: int, K: int, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(N, K), torch.randn(r, K), torch.randn(N, r)


# --- peers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [dora_peers.identity_norm, dora_peers.dense_norm, dora_peers.factored_norm])
def test_every_way_to_the_norm_is_the_norm(way: Any) -> None:
    W, A, B = operands(70, 300, 5)
    exact = (W.double() + 0.7 * B.double() @ A.double()).norm(dim=1)
    torch.testing.assert_close(way(W, A, B, 0.7).double(), exact, rtol=1e-5, atol=1e-5)


def test_factored_norm_goes_over_all_chunks() -> None:
    W, A, B = operands(16, 333, 3)
    budget = 4 * (16 * 3 + 9) + 4 * (16 + 3) * 100
    assert dora_peers.chunk_columns(16, 333, 3, budget) == 64, "100 columns would fit, 64 is the multiple of 64"
    whole = dora_peers.factored_norm(W, A, B, 1.3)
    torch.testing.assert_close(dora_peers.factored_norm(W, A, B, 1.3, budget), whole)
    assert dora_peers.chunk_columns(16, 333, 3) == 333
    assert dora_peers.chunk_columns(16, 333, 3, 0) == 1


def test_paper_layer_is_the_layer_of_peft() -> None:
    """In float32, value and all gradients; the weight's own norm is frozen in both."""
    case = dora_layer.Case(48, 40, 32, 4)
    inputs = dora_layer.Inputs.random(case, CPU)
    lora = inputs.lora
    weight = nn.Parameter(lora.weight_NK.float(), requires_grad=False)
    paper = dora_peers.PaperLayer(weight, lora.A_rK, lora.B_Nr, inputs.magnitude_N, dora_layer.SCALING)
    _, one, parameters = peft_model(weight, lora.A_rK, lora.B_Nr, 0.0, True, inputs.magnitude_N)
    results = []
    for call, own in ((paper, [paper.A, paper.B, paper.magnitude]), (one, parameters)):
        x = lora.x.detach().float().requires_grad_()
        y = call(x)
        results.append([y, *torch.autograd.grad(y, [x, *own], lora.dy.float())])
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)


# --- inputs and contenders ---------------------------------------------------------------------------------------------


def test_inputs_are_dense_and_g_is_away_from_1() -> None:
    inputs = dora_layer.Inputs.random(dora_layer.Case(64, 96, 32, 8), CPU)
    lora = inputs.lora
    for tensor in (lora.x, lora.dy, lora.weight_NK, lora.A_rK, lora.B_Nr):
        assert tensor.is_contiguous() and 0 not in tensor.stride() and (tensor == 0).float().mean() < 0.01
    norm = (lora.weight_NK.double() + 2.0 * lora.B_Nr.double() @ lora.A_rK.double()).norm(dim=1)
    g = inputs.magnitude_N.double() / norm
    assert 0.005 < float((g - 1).abs().mean()) < 0.05
    assert torch.equal(inputs.magnitude_N.bfloat16().float(), inputs.magnitude_N), (
        "all regimes start from the same values"
    )


def test_a_contender_with_wrong_results_is_not_timed(monkeypatch: Any) -> None:
    """A norm that is not that of the present values, a magnitude that is not the given one."""
    inputs = dora_layer.Inputs.random(dora_layer.Case(64, 96, 32, 8), CPU)
    dora_layer.contender("packlora", inputs).make()
    right = norms.RowNorms.add

    class Stale:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def get(self) -> torch.Tensor:
            return self.handle.get() * 1.2  # type: ignore[no-any-return]

    monkeypatch.setattr(norms.RowNorms, "add", lambda self, *args, **more: Stale(right(self, *args, **more)))
    with pytest.raises(AssertionError, match=r"y differs from PEFT's by"):
        dora_layer.contender("packlora", inputs).make()


def test_a_stepped_contender_is_written_to_before_every_run_and_others_are_not(monkeypatch: Any) -> None:
    """By version counters, which is what keeps or drops a norm."""
    inputs = dora_layer.Inputs.random(dora_layer.Case(64, 96, 32, 8), CPU)
    made: list[dora_layer.Operator] = []
    of = dora_layer.Operator.of

    def watched(*args: Any) -> dora_layer.Operator:
        made.append(of(*args))
        return made[-1]

    monkeypatch.setattr(dora_layer.Operator, "of", watched)
    for name, moves in (("packlora", False), ("packlora_stepped", True)):
        work = dora_layer.contender(name, inputs).make()
        work.step()
        for _ in range(2):
            before = [parameter._version for parameter in made[-1].parameters]
            work.clear()
            written = [p._version > old for p, old in zip(made[-1].parameters, before, strict=True)]
            assert written == [moves, moves, False]  # A, B and the magnitude
            work.step()
            assert all(parameter.grad is not None for parameter in made[-1].parameters)


def test_multi_mixes_lora_and_dora_and_checks_every_adapter() -> None:
    case = dora_layer.MultiCase(64, 96, 96)
    inputs = dora_layer.multi.Inputs.random(case, CPU)
    factors = dora_layer.multi_factors(inputs)
    assert [len(own) for own in factors] == [2, 3, 2, 3]
    dora_layer.multi_contender("packlora", inputs, factors).make()
    A, B, magnitude = factors[3]
    call = dora_layer.Operator.call
    wrong = [*factors[:3], (A, B, magnitude * 1.1)]

    def swapped(self: Any, *args: Any) -> Any:
        return call(
            dora_layer.Operator.of(inputs.weight_NK, wrong, [(r.start, r.stop, 0.0) for r in self.segments], True),
            *args,
        )

    made = dora_layer.multi_contender("packlora", inputs, factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dora_layer.Operator, "call", swapped)
        with pytest.raises((AssertionError, RuntimeError)):
            made.make()


def test_all_legal_plans_can_be_listed() -> None:
    inputs = dora_layer.Inputs.random(dora_layer.Case(64, 96, 32, 8), CPU)
    names = dora_layer.plans_of(inputs)
    assert names and all(name.startswith("packlora:") for name in names) and len(set(names)) == len(names)
    for name in names:
        assert dora_layer.contender(name, inputs).make().note == f"plan {name.partition(':')[2]}"


def test_compose_bandwidth_counts_what_must_be_moved() -> None:
    timings = Timings({"copy": Timing("copy", [3.0] * 3), "kernel": Timing("kernel", [4.0] * 3),
                       "kernel_both": Timing("kernel_both", [8.0] * 3)})  # fmt: skip
    assert dora_compose.of_copy(timings, "kernel") == pytest.approx(3 / 4)
    assert dora_compose.of_copy(timings, "kernel_both") == pytest.approx((8 / 8) / (3 / 3))


# --- summary -----------------------------------------------------------------------------------------------------------


def rows_of_a_whole_run() -> list[dict[str, Any]]:
    """Every case of every part, with made-up times: 1 of the first contender, of others their place times the case's number."""

    def timings(names: list[str], number: int) -> dict[str, Any]:
        made = {
            name: Timing(name, [float(place * number) if place > 1 else 1.0] * 3, [1.0] * 3, 0, 2**30)
            for place, name in enumerate(names, 1)
        }
        return Timings(made).row()

    rows: list[dict[str, Any]] = []
    for number, case in enumerate(dora_norm.cases(on_gpu()), 1):
        row = {"part": "norm", "case": case.label, "K": case.K, "N": case.N, "r": case.rank, "layers": case.layers}
        rows.append({**row, **timings(dora_norm.CONTENDERS, number), "over_packlora": {}})
    for case in dora_compose.cases(on_gpu()):
        shares = {"kernel": 0.9 if case.M * case.N >= dora_compose.LARGE else 0.1, "kernel_both": 0.8, "eager": 0.3}
        row = {"part": "compose", "case": case.label, "M": case.M, "N": case.N, "of_copy": shares}
        rows.append({**row, **timings(dora_compose.CONTENDERS, 1)})
    for number, layer in enumerate(dora_layer.cases(on_gpu()), 1):
        row = {"part": "layer", "case": layer.label, "K": layer.K, "N": layer.N, "T": layer.T, "r": layer.rank}
        rows.append({**row, "dropout": layer.dropout, "shape": layer.shape, **timings(dora_layer.CONTENDERS, number)})
    for key in REQUIRED[-3:]:
        rows.append({"part": "quality", "case": key, "figures": {key: 0.5}, "failed": {}})
    return rows


def test_summary_has_the_required_keys_with_the_rows_values() -> None:
    rows = rows_of_a_whole_run()
    summary = dora.summary(rows)
    for key in REQUIRED:
        assert isinstance(summary[key], float), key
    place_of = {row["case"]: number for number, row in enumerate((r for r in rows if r["part"] == "layer"), 1)}
    peft = 1 + dora_layer.CONTENDERS.index("peft_bf16")
    for key, case, place in (
        ("layer_r16_4096_over_frozen", "layer 4096x4096 T8192 r16 p0", 2),
        ("layer_r384_4096x14336_over_frozen", "layer 4096x14336 T8192 r384 p0", 2),
        ("peft_bf16_layer_r384_8192_over_frozen", "layer 8192x8192 T8192 r384 p0", peft),
    ):
        assert summary[key] == place * place_of[case]
    at = next(number for number, row in enumerate(rows, 1) if row["case"] == "norm 4096x4096 r384")
    assert summary["norm_refresh_us"] == pytest.approx(1e3)
    assert summary["norm_refresh_fp32_us"] == pytest.approx(2e3 * at)
    assert summary["norm_refresh_dense_us"] == pytest.approx(1e3 * at * (1 + dora_norm.CONTENDERS.index("dense")))
    assert summary["compose_of_copy_bandwidth"] == pytest.approx(0.9), "small shapes do not count"
    assert not set(on_gpu(quick=True).keys(summary)) & set(REQUIRED)


def test_a_failed_contender_leaves_no_figure() -> None:
    rows = rows_of_a_whole_run()
    for row in rows:
        if row["part"] == "layer":
            for figures in (row["ms"], row["over_frozen"]):
                del figures["packlora"]
            row["failed"] = {"packlora": "broke"}
    summary = dora.summary(rows)
    assert summary["layer_r16_4096_over_frozen"] is None
    assert dora.summary([row for row in rows if row["part"] == "norm"])["convergence_over_noise"] is None


def test_goals_cases_are_those_of_the_required_keys() -> None:
    cases = [case for case in dora_layer.cases(on_gpu()) if case.T == 8192 and not case.dropout]
    assert {(case.K, case.N, case.rank) for case in cases} == {
        (K, N, rank) for K, N in [(4096, 4096), (4096, 14336), (8192, 8192)] for rank in (16, 64, 384)
    }
    assert len(dora_compose.SHAPES) == len(set(dora_compose.SHAPES)) == 20


# --- whole runs and parts ----------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_whole_benchmark_runs_at_toy_sizes(quick: None, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "dora-cpu.json"
    for name, key in (
        ("dora-fidelity", "logit_cosine_min_float32"), ("dora-convergence", "convergence_over_noise"),
    ):  # fmt: skip
        file = {"commit": "c", "date": "d", "device": "cpu", "protocol": "p", "summary": {key: 0.25}}
        (tmp_path / f"{name}-cpu.json").write_text(json.dumps(file))
    code = run_bench("dora", out, quick=True, device="cpu", plots=True)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    content = json.loads(out.read_text())
    assert content["name"] == "dora-cpu" and content["protocol"]
    assert {row["part"] for row in content["rows"]} == set(PARTS["dora"])
    for row in content["rows"]:
        assert row["failed"] == {}
        if row["part"] in ("layer", "multi", "model", "paper-model", "inference"):
            assert row["rounds"] == 2 and row["over_frozen"]["packlora"] > 0
        if row["part"] == "norm" and "error" in row:
            assert row["error"]["packlora_fp32"] < 1e-2 and row["over_packlora"]["packlora"] == 1.0
    dropped = next(row for row in content["rows"] if row.get("dropout"))
    assert dora_layer.LOW_RANK in dropped["ms"] and "paper" not in dropped["ms"]
    (forward,) = (row for row in content["rows"] if row["part"] == "inference")
    assert set(forward["ms"]) == {"frozen", "packlora", "packlora_fp32", "peft_bf16", "peft_fp32_autocast"}
    assert content["summary"]["part_inference_r24_peft_fp32_autocast_over_packlora_fp32"] > 0
    assert content["summary"]["part_logit_cosine_min_float32"] == 0.25
    assert (
        content["summary"]["part_logit_cosine_16bit_minus_peft"] is None and "has no logit_cosine_16bit" in printed.out
    )
    assert all(key.startswith("part_") for key in content["summary"])
    assert (tmp_path / "dora-cpu-near-unity.png").stat().st_size > 1000


def test_parts_are_measured_alone_and_the_others_stay(quick: None, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "dora-cpu.json"
    monkeypatch.setattr(Options, "keys", lambda self, summary, by_case=False: summary)  # a file as of a GPU
    assert run_bench("dora", out, quick=True, device="cpu", parts="norm,compose") == 0
    first = json.loads(out.read_text())
    assert {row["part"] for row in first["rows"]} == {"norm", "compose"}
    with pytest.raises(InputError, match="holds other parts in full"):
        run_bench("dora", out, quick=True, device="cpu", parts="multi")
    first["rows"] = [row for row in first["rows"] if row["part"] == "norm"]
    out.write_text(json.dumps(first))
    assert run_bench("dora", out, quick=True, device="cpu", parts="norm") == 0, "nothing is kept, nothing is mixed"

    kept = {"part": "multi", "case": "multi 4096x4096 T8192", "K": 4096, "N": 4096, "T": 8192, "failed": {}, "ms": {}}
    kept |= {"over_frozen": {"packlora": 1.25}, "peak_mib": {}}
    out.write_text(json.dumps({**first, "rows": [*first["rows"], kept], "summary": {}}))
    options = Options(CPU, True, (), None, ("norm",), run_kept(out), out)
    outcome = dora.run(options)
    assert [row["part"] for row in outcome.rows].count("multi") == 1
    stays = next(row for row in outcome.rows if row["part"] == "multi")
    assert stays["measured"] == {"commit": first["commit"], "date": first["date"]}
    assert outcome.summary["multi_4096x4096_over_frozen"] == 1.25


def run_kept(out: Path) -> tuple[dict[str, Any], ...]:
    from benchmarks.results import rows_of_other_parts

    file = json.loads(out.read_text())
    return rows_of_other_parts(out, file["name"], file["device"], ("norm",), dora.part_of)


def test_rows_of_other_parts_are_kept_only_from_a_file_of_the_same_kind(tmp_path: Path) -> None:
    from benchmarks.results import rows_of_other_parts

    out = tmp_path / "x.json"
    assert rows_of_other_parts(out, "dora-h200", "H200", ("norm",), dora.part_of) == ()
    file = {"name": "dora-h200", "device": "H200", "commit": "c", "date": "d", "rows": [], "summary": {"a": 1}}
    for change, message in (
        ({"name": "model-h200"}, "is of model-h200 on H200; this is dora-h200 on H200"),
        ({"device": "A100"}, "is of dora-h200 on A100"),
        ({"summary": {"part_a": 1}}, "--quick, --only, --layers or --seconds"),
    ):
        out.write_text(json.dumps({**file, **change}))
        with pytest.raises(InputError, match=message):
            rows_of_other_parts(out, "dora-h200", "H200", ("norm",), dora.part_of)
    out.write_text("no json")
    with pytest.raises(InputError, match="no results file"):
        rows_of_other_parts(out, "dora-h200", "H200", ("norm",), dora.part_of)


def test_wrong_parts_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    with pytest.raises(InputError, match=r"no part 'norms'; it has norm, compose, layer"):
        run_bench("dora", out, quick=True, device="cpu", parts="norms")
    with pytest.raises(InputError, match=r"--parts is for model and dora"):
        run_bench("layer", out, quick=True, device="cpu", parts="norm")
    with pytest.raises(InputError, match=r"--only needs one part"):
        run_bench("dora", out, quick=True, device="cpu", only="packlora")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_the_model_benchmark_know_their_part() -> None:
    assert [case.part for case in model.cases(on_gpu())] == ["lora"] * 2 + ["dora"] * 2 + ["layers"] * 9
    assert model.part_of({"kind": "model"}) == "lora", "files from before there was DoRA"
    assert model.part_of({"kind": "model", "dora": True}) == "dora"
    assert model.part_of({"kind": "layer"}) == "layers"


def test_a_missing_or_broken_quality_file_is_said(tmp_path: Path, capsys: Any) -> None:
    options = Options(CPU, out=tmp_path / "dora-cpu.json")
    assert dora.quality(options) == []
    assert "python -m benchmarks dora-convergence writes it" in capsys.readouterr().out
    (tmp_path / "dora-fidelity-cpu.json").write_text(json.dumps({"summary": {}}))
    with pytest.raises(InputError, match="is not a result file with logit_cosine_min"):
        dora.quality(options)


def test_readme_shows_the_layers(tmp_path: Path, monkeypatch: Any) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    assert sections.dora() == []
    rows = rows_of_a_whole_run()
    (results / "dora-h200.json").write_text(json.dumps({"device": "H200", "rows": rows, "summary": dora.summary(rows)}))
    lines = sections.dora()
    assert sum(line.startswith("| 4096 x 14336, r") for line in lines) == 3
    assert any("at r 384" in line for line in lines)


# --- the two scripts ---------------------------------------------------------------------------------------------------


def test_fidelity_script(tmp_path: Path) -> None:
    out = tmp_path / "fidelity.json"
    dora_fidelity.main(["--out", str(out), "--device", "cpu", "--tiny", "--samples", "3", "--length", "24"])
    content = json.loads(out.read_text())
    assert content["name"] == "dora-fidelity-cpu" and "RANDOM weights" in content["protocol"]
    assert {row["case"] for row in content["rows"]} == set(dora_fidelity.REGIMES)
    summary = content["summary"]
    assert summary["fp32_packlora_exact_min"] > 1 - 1e-9
    assert summary["logit_cosine_min"] == min(row["packlora_peft"]["min"] for row in content["rows"]) > 0.99
    assert summary["logit_cosine_min_float32"] == summary["fp32_packlora_peft_min"] > 1 - 1e-9
    differences = [
        summary[f"{name}_packlora_exact_min"] - summary[f"{name}_peft_exact_min"] for name in ("bf16", "fp16")
    ]
    assert summary["logit_cosine_16bit_minus_peft"] <= min(differences)
    assert summary["bf16_packlora_exact_min"] < 1 - 1e-9, "float64 and bfloat16 cannot agree: something was not run"


def test_fidelity_sees_a_wrong_magnitude(monkeypatch: Any) -> None:
    base, tokenizer, _ = dora_fidelity.load_base(True, tiny=True)
    batch = dora_fidelity.padded(dora_fidelity.samples("eval.jsonl", 2, 16, tokenizer), CPU)
    honest = dora_fidelity.compare(base, "fp32", batch, 4)
    right = dora_fidelity.accelerate

    def wrong(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_magnitude" in name:
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        return right(model)

    monkeypatch.setattr(dora_fidelity, "accelerate", wrong)
    changed = dora_fidelity.compare(base, "fp32", batch, 4)
    assert 1 - changed["packlora_peft"]["min"] > 1000 * (1 - honest["packlora_peft"]["min"])


def test_convergence_script(tmp_path: Path) -> None:
    out = tmp_path / "convergence.json"
    dora_convergence.main(["--out", str(out), *SMALL, "--steps=12", "--exact"])
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert [row["steps"] for row in rows] == [12, 12] and all(row["random_weights"] for row in rows)
    assert rows[0]["losses_peft"] != rows[1]["losses_peft"], "seeds differ"
    assert content["summary"]["convergence_mean_abs"] < 1e-5
    gaps = [abs(a - b) for row in rows for a, b in zip(row["losses_peft"], row["losses_packlora"], strict=True)]
    assert content["summary"]["convergence_max_abs"] == pytest.approx(max(gaps))
    assert content["summary"]["convergence_mean_abs"] == pytest.approx(sum(gaps) / len(gaps))
    assert content["summary"]["convergence_mean_abs_peft_to_fp32"] == 0.0, "on a CPU PEFT is in float32 anyway"
    assert content["summary"]["convergence_mean_abs_packlora_to_fp32"] == content["summary"]["convergence_mean_abs"]
    noise = content["summary"]["convergence_noise_mean_abs"]
    assert 0 < noise < 1e-5, "other sums, the same numbers"
    assert content["summary"]["convergence_over_noise"] == content["summary"]["convergence_mean_abs"] / noise
    for row in rows:
        assert abs(row["losses_peft"][-1] - row["losses_peft"][0]) > 1e-4, "it trains"


@pytest.mark.soak
def test_convergence_of_one_way_after_the_other_is_that_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--steps=4", "--data=python"]
    both, apart = tmp_path / "both.json", tmp_path / "apart.json"
    dora_convergence.main(["--out", str(both), *words])
    dora_convergence.main(["--out", str(apart), *words, "--ways=peft"])
    assert "the results follow when packlora, peft_reversed is run" in capsys.readouterr().out
    assert not apart.exists()
    with pytest.raises(InputError, match="--steps=3"):
        dora_convergence.main(["--out", str(apart), *SMALL, "--steps=3", "--data=python", "--ways=packlora"])
    dora_convergence.main(["--out", str(apart), *words, "--ways=packlora,peft_reversed"])
    rows = [[{**row, "seconds": None} for row in json.loads(out.read_text())["rows"]] for out in (both, apart)]
    assert rows[0] == rows[1]
    assert "standard library (6 samples of 40 tokens)" in json.loads(apart.read_text())["protocol"]
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["apart.json", "both.json"]
    with pytest.raises(InputError, match="accepted are peft, packlora, peft_reversed"):
        dora_convergence.main(["--out", str(apart), *words, "--ways=pefd"])


def test_source_of_the_standard_library_is_cut_into_whole_samples() -> None:
    rows = dora_convergence.source_rows(50, 300, None)
    assert len(rows) == 50 and {len(row) for row in rows} == {300}
    assert rows == dora_convergence.source_rows(50, 300, None)
    assert b"import" in b"".join(map(bytes, rows))
    assert len({tuple(row) for row in rows}) == 50


def convergence_args(out: Path, *words: str) -> Any:
    """A toy run's options."""
    return dora_convergence.options(["--out", str(out), *SMALL, "--steps=5", *words])


def trainee(way: str, args: Any, seed: int = 0) -> dora_convergence.Trainee:
    base, tokenizer, _ = dora_fidelity.load_base(True, tiny=True)
    rows = dora_fidelity.samples("train.jsonl", args.rows, args.length, tokenizer)
    return dora_convergence.Trainee(way, seed, base, rows, CPU, args)


def played_back(change: float = 0.0) -> Any:
    """In the place of captured() where there is no GPU: a replay is the step once more."""

    def captured(step: Any, warm_up: Any, lane: Any) -> Any:
        warm_up()
        loss = torch.zeros(())
        return lambda: loss.copy_(step() + change), loss

    return captured


@pytest.mark.parametrize("way", dora_convergence.WAYS)
def test_convergence_graph_starts_where_the_plain_run_does(way: str, tmp_path: Path, monkeypatch: Any) -> None:
    args = convergence_args(tmp_path / "x.json")
    plain, graph = trainee(way, args), trainee(way, args)
    monkeypatch.setattr(dora_convergence, "captured", played_back())
    graph.capture()
    for one in (plain, graph):
        for _ in range(5):
            one.advance()
        one.evaluate(dora_fidelity.samples("eval.jsonl", 3, 40, None), 40)
    assert graph.record() == {**plain.record(), "graph_gap": 0.0} and "graph_gap" not in plain.record()
    assert len(plain.record()["losses"]) == 5 and plain.record()["eval"] > 0


@pytest.mark.parametrize("change", [0.03, float("nan")])
def test_convergence_graph_that_computes_something_else_is_seen(
    change: float, tmp_path: Path, monkeypatch: Any
) -> None:
    one = trainee("packlora", convergence_args(tmp_path / "x.json"))
    monkeypatch.setattr(dora_convergence, "captured", played_back(change))
    one.capture()
    with pytest.raises(dora_convergence.WrongGraph, match="step 0: the graph's loss is"):
        one.advance()


def test_convergence_of_a_way_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU, at once: PEFT's graph computes something else, packlora's capture fails, the last way's replay breaks."""
    args = convergence_args(tmp_path / "x.json", "--seeds=1")
    ways, captures = (*dora_convergence.WAYS, dora_convergence.EXACT), iter(range(4))
    alone = dora_convergence.train(dora_convergence.WAYS, CPU, args, math.inf, graphs=False)
    monkeypatch.setattr(dora_convergence, "CHUNK", 2)
    monkeypatch.setattr(dora_convergence, "SAVED", 2)

    def captured(step: Any, warm_up: Any, lane: Any) -> Any:
        number = next(captures)
        replay, loss = played_back(0.03 if number == 0 else 0.0)(step, warm_up, lane)
        if number == 1:
            raise RuntimeError("operation not permitted when stream is capturing")

        def breaks() -> None:
            assert step.__self__.done < 3, "broke"
            replay()

        return breaks if number == 3 else replay, loss

    monkeypatch.setattr(dora_convergence, "captured", captured)
    records = dora_convergence.train(ways, CPU, args, math.inf, graphs=True)
    assert {way: record["graph"] for way, record in records.items()} == {
        "packlora": False, "peft_reversed": True, "peft": False,
    }  # fmt: skip
    for way, record in records.items():
        assert record["runs"][0] | {"graph_gap": None} == alone[way]["runs"][0] | {"graph_gap": None}
        assert json.loads(dora_convergence.part(args.out, way).read_text()) == record
    assert records["peft"]["together"] == ["peft"] and records["packlora"]["together"] == list(ways)
    left = json.loads(dora_convergence.part(args.out, dora_convergence.EXACT).read_text())
    assert len(left["runs"][0]["losses"]) == 2 and not left["done"], "what was written before"


def test_convergence_of_ended_runs_is_compared_when_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "ended.json"
    monkeypatch.setattr(dora_convergence, "CHUNK", 2)
    monkeypatch.setattr(dora_convergence, "SAVED", 2)
    steps = iter(range(3 * 2 * 3))  # three steps of three ways and two seeds
    advance = dora_convergence.Trainee.advance

    def ended(one: Any) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        advance(one)

    monkeypatch.setattr(dora_convergence.Trainee, "advance", ended)
    args = convergence_args(out)
    with pytest.raises(KeyboardInterrupt):
        dora_convergence.train(dora_convergence.WAYS, CPU, args, math.inf, graphs=False)
    words = ["--out", str(out), *SMALL, "--steps=5"]
    monkeypatch.setattr(dora_convergence.Trainee, "advance", advance)
    with pytest.raises(InputError, match="of a run that was ended"):
        dora_convergence.main([*words, "--ways=packlora"])
    dora_convergence.main([*words, "--ways=none"])
    content = json.loads(out.read_text())
    assert content["summary"]["convergence_steps"] == 2 and "2 (of 5 that were asked for) steps" in content["protocol"]
    assert content["summary"]["convergence_eval_abs"] is None and content["rows"][1]["mean_abs"] < 1e-5


def test_convergence_ends_when_its_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "short.json"
    dora_convergence.main(["--out", str(out), *SMALL, "--steps=1000", "--seconds=0.01"])
    content = json.loads(out.read_text())
    assert content["summary"]["convergence_steps"] == dora_convergence.CHUNK
    assert "10 (of 1000 that were asked for" in content["protocol"]
    assert [path.name for path in tmp_path.iterdir()] == ["short.json"], "parts are gone"


def test_convergence_compares_the_steps_that_both_did() -> None:
    run = {"seconds": 1.0, "eval": 2.0}
    peft, ours = {**run, "losses": [3.0, 2.0, 1.0]}, {**run, "losses": [3.5, 2.0]}
    again = {**run, "losses": [3.0, 2.125, 1.0]}
    row = dora_convergence.compared(0, peft, ours, again, {**run, "losses": [2.0]})
    assert (row["steps"], row["mean_abs"], row["max_abs_step"], row["last_tenth_loss"]) == (2, 0.25, 0, 2.0)
    assert (row["noise_mean_abs"], dora_convergence.summary([row])["convergence_over_noise"]) == (0.0625, 4.0)
    assert (row["steps_to_fp32"], row["mean_abs_peft_to_fp32"], row["mean_abs_packlora_to_fp32"]) == (1, 1.0, 1.5)
    assert row["eval_abs"] is None, "after other numbers of steps"
    assert dora_convergence.summary([row])["convergence_eval_abs"] is None
    assert dora_convergence.compared(0, peft, {**peft, "eval": 2.5}, peft, None)["eval_abs"] == 0.5


def test_small_updates_compares_losses_at_the_same_parameters(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    small_updates.main(["--tiny", "--device=cpu", "--out", str(out), "--rows=100", "--length=16"])
    content = json.loads(out.read_text())
    assert [row["case"] for row in content["rows"][:4]] == [f"LoRA, {steps} steps" for steps in (0, 1, 3, 10)]
    for row in content["rows"]:
        exact = row["losses"]["peft_fp32"]
        assert abs(row["loss_fp32"] - sum(exact) / len(exact)) < 1e-9
        for way, excess in row["excess"].items():
            assert abs(excess - (sum(row["losses"][way]) / len(exact) - row["loss_fp32"])) < 1e-9
            assert abs(excess) < 0.01, "the same parameters"
    last = content["rows"][3]
    assert last["gained"] == content["rows"][0]["loss_fp32"] - last["loss_fp32"] > 0.01, "it trained"
    assert content["summary"]["lora_10_excess_peft"] == last["excess"]["peft"]
