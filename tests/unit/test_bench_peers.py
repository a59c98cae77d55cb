"""`python -m benchmarks peers` and `bench workloads` at toy sizes, and fetching other projects' kernels."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig

from benchmarks import peer_block, workloads
from benchmarks.options import Options
from benchmarks.peers import eager, sources
from benchmarks.peers.sources import Source, fetched, folder_of
from benchmarks.run import run_bench
from packlora.adapters.attach import attach
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.errors import InputError
from packlora.plans.timing import paired

CPU = torch.device("cpu")


def test_sources_are_fetched_once_at_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """From a repository on this disk whose newest commit is another one."""
    repository = tmp_path / "repository"
    (repository / "src" / "name").mkdir(parents=True)

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(
            ["git", "-C", str(repository), *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    for number in (1, 2):
        (repository / "src" / "name" / "kernel.py").write_text(f"VALUE = {number}\n")
        (repository / "other.py").write_text("")
        git("add", "-A")
        git("commit", "-q", "-m", f"{number}")
    commit = git("rev-parse", "HEAD~1")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))
    source = Source(repository.as_uri(), commit, ("src/name",), "src")
    monkeypatch.setattr(sources, "SOURCES", {"name": source})
    assert fetched("name") == folder_of("name") / "src"
    assert (fetched("name") / "name" / "kernel.py").read_text() == "VALUE = 1\n"
    assert capsys.readouterr().out.count("fetching") == 1
    assert sorted(path.name for path in folder_of("name").iterdir()) == ["src"], "what is wanted, and no history"
    assert [path.name for path in folder_of("name").parent.iterdir()] == [folder_of("name").name]

    monkeypatch.setattr(sources, "SOURCES", {"name": Source(repository.as_uri(), "0" * 40, ("src/name",))})
    with pytest.raises(
        InputError, match=r"^name cannot be fetched from .*put src/name of commit 0{40} into .*name-0{12}"
    ):
        fetched("name")
    assert not folder_of("name").exists()


def test_plain_operations_are_what_the_operator_computes(monkeypatch: pytest.MonkeyPatch) -> None:
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
    calls, original = [], eager.forward

    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(eager, "forward", counted)
    with eager.eager(model):
        torch.testing.assert_close(run(), ours, rtol=1e-9, atol=1e-9)
    assert len(calls) == 3 * model.config.num_hidden_layers
    torch.testing.assert_close(run(), ours, rtol=0, atol=0)
    assert len(calls) == 3 * model.config.num_hidden_layers


def test_peers_at_toy_sizes_are_right_and_a_wrong_one_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = lambda *args, **options: paired(*args, **{**options, "seconds": 0, "rounds": (2, 2), "warmup": 1})  # noqa: E731
    monkeypatch.setattr(peer_block, "paired", quick)

    def scaled(name: str, model: torch.nn.Module) -> None:
        """In the place of a project's kernels: PEFT's own, o_proj a thousandth too large."""
        model.out.register_forward_hook(lambda module, args, y: y * 1.001)

    monkeypatch.setattr(peer_block, "use_peer", scaled)
    monkeypatch.setattr(peer_block, "fetched", lambda name: tmp_path)
    out = tmp_path / "peers.json"
    assert run_bench("peers", out, quick=True, device="cpu", only="p0,lora,packlora,peft_bf16,axolotl") == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["over_frozen"]) == {"packlora", "peft_bf16"}
    assert row["failed"].keys() == {"axolotl"} and "is rounding" in row["failed"]["axolotl"]
    assert max(row["error"].values()) < 1e-5


def test_a_project_is_left_out_where_it_would_run_peft() -> None:
    by_label = {case.label: case for case in peer_block.cases(Options(torch.device("cuda")))}
    plain, dropped = by_label["block T8192 p0 lora"], by_label["block T2048 p0.1 lora"]
    assert peer_block.taking_part(plain, peer_block.CONTENDERS) == peer_block.CONTENDERS
    assert "unsloth" not in peer_block.taking_part(dropped, peer_block.CONTENDERS)
    dora = peer_block.taking_part(by_label["block T8192 p0 dora"], peer_block.CONTENDERS)
    assert dora == ["frozen", "packlora", "packlora_recompute", "peft_bf16", "peft_compiled", "axolotl"]


def test_a_workload_at_toy_sizes_trains_as_many_rounds_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "UNITS", 1)
    out = tmp_path / "workloads.json"
    assert run_bench("workloads", out, quick=True, device="cpu", only="mix,packlora,packlora_apart,peft_packed") == 0
    content = json.loads(out.read_text())
    (row,) = content["rows"]
    assert set(row["tokens_per_s"]) == {"packlora", "packlora_apart", "peft_packed"} and row["estimates"]
    jobs = workloads.jobs_of("mix", 320, tiny=True)
    assert all(len(job.samples) == 17 * workloads.BATCH for job in jobs), (
        "of sixteen rounds, and of one that is not run"
    )
    whole = sum(sample.num_tokens for job in jobs for sample in job.samples)
    units = workloads.WARMUP + workloads.UNITS
    for tokens in row["unit_tokens"].values():  # an eighth of the rounds each
        assert len(tokens) == units and sum(tokens) == pytest.approx(whole * units / 8, rel=0.4)
    counts = row["microbatches"]
    assert counts["auto"] <= counts["greedy"] and counts["auto"] <= counts["apart"]
    assert all(key.startswith("part_") for key in content["summary"])


def test_a_summary_of_five_workloads_compares_with_each_peer_s_faster_way() -> None:
    rates = {"packlora": 8.0, "packlora_apart": 4.0, "peft_packed": 1.0, "peft_rows": 2.0, "lorafusion_packed": 4.0}
    rows = [
        {"key": name, "tokens_per_s": rates, "microbatches": {"greedy": 11, "auto": 10, "apart": 15}}
        for name in workloads.NAMES
    ]
    summary = workloads.summary(rows)
    assert [summary[f"workloads_{key}"] for key in ("vs_peft_best", "vs_lorafusion_best", "merging")] == [
        pytest.approx(4.0), pytest.approx(2.0), pytest.approx(2.0),
    ]  # fmt: skip
    assert (summary["microbatches_without_milp"], summary["microbatches_without_merging"]) == (1.1, 1.5)
    assert workloads.summary(rows[:4])["workloads_vs_peft_best"] is None, "no mean over fewer than all"
    assert workloads.NAMES == ["xsum", "cnn_dailymail", "wikisum", "mix", "het"]
