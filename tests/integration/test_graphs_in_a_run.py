"""Whole runs by graphs on a CPU, with a recorder whose replays run the functions again: the loop around what is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS, tiny_model
from graph_runs import attention_by_starts, replay_of
from safetensors.torch import load_file
from test_members import at_window, request

import packlora
from packlora.engine import recorded
from packlora.engine.adapters import AdapterState
from packlora.engine.graphs import GraphedDevice
from packlora.engine.recorded import Recorder
from packlora.events import Note, Subscriber, WindowPlanned
from packlora.ops.attention import attention
from packlora.ops.lora_linear.plan import CHAIN, ROUTED
from packlora.plans.select import PlanChooser
from packlora.runtime import cuda_graphs
from packlora.schedule.planner import Planner
from packlora.sweep.control import Add, StopJob

Tree = dict[str, Any]
RECORDED: list[Callable[[], None]] = []


@pytest.fixture
def tree(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Two jobs whose steps lie apart."""
    base = tmp_path / "base"
    tiny_model("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=48).save_pretrained(base)
    tokenizer.save_pretrained(base)
    jobs = []
    for name, rows, size, adapter in (
        ("a", 6, 2, {"lora_dropout": 0.1}),
        ("b", 9, 3, {"use_dora": True, "lora_dropout": 0}),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": word, "completion": name}) + "\n" for word in WORDS[:rows]))
        train = {"global_batch_size": size, "learning_rate": 1e-2, "weight_decay": 0.1}
        jobs.append(
            {
                "name": name, "data": {"path": str(path), "eval_path": str(path)}, "train": train,
                "adapter": {"r": 2, "target_modules": ["v_proj"], **adapter},
            }
        )  # fmt: skip
    monkeypatch.setattr(cuda_graphs, "why_no_graphs", lambda *_: None)
    monkeypatch.setattr(Recorder, "__init__", lambda self, device: None)
    monkeypatch.setattr(Recorder, "record", lambda self, function: RECORDED.append(function) or replay_of(function))
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 32)
    monkeypatch.setattr(
        PlanChooser, "plan_of", lambda self, x, layers, segments, known=True: CHAIN if known else ROUTED
    )
    return {"base_model": str(base), "device": "cpu", "max_tokens_per_microbatch": 60, "save_every": 1, "jobs": jobs}


def trained(
    tree: Tree, out: Path, graphs: bool = True, more: Sequence[Subscriber] = (), **options: Any
) -> dict[str, dict[str, torch.Tensor]]:
    RECORDED.clear()
    notes: list[Any] = []
    told: list[Any] = [lambda event: notes.append(event.text) if isinstance(event, Note) else None, *more]
    with pytest.MonkeyPatch.context() as patch:
        attention_by_starts(patch)
        patch.setattr(attention, "uses_kernels", lambda *_: graphs)
        packlora.train(
            {**tree, "output_dir": str(out), "cuda_graphs": graphs}, resume=True, subscribers=told, **options
        )
    assert bool(RECORDED) == graphs and not any("CUDA graphs" in note for note in notes)
    ended = sorted(path.parent.name for path in out.glob("*/adapter_model.safetensors"))
    return {name: load_file(out / name / "adapter_model.safetensors") for name in ended}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_by_graphs_is_one_without_and_has_its_bits_whatever_becomes_of_it(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["eval_every"], launch, launched = 1, GraphedDevice._launch, list[bool]()

    def watched(device: GraphedDevice, ready: Any) -> Any:
        launched.append(device._ready is ready)
        return launch(device, ready)

    monkeypatch.setattr(GraphedDevice, "_launch", watched)
    plain, whole = trained(tree, tmp_path / "plain", graphs=False), trained(tree, tmp_path / "whole")
    assert any(launched)  # ahead of evaluations and checkpoints, and not so below
    for name in "ab":
        for key, tensor in whole[name].items():
            torch.testing.assert_close(tensor, plain[name][key], rtol=1e-3, atol=1e-4)
    trained(tree, tmp_path / "cut", max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedDevice, "prepare", lambda *_: None)
        cut = trained(tree, tmp_path / "cut", resume_from=["a=1"])
    assert same(cut["a"], whole["a"]) and same(cut["b"], whole["b"])
    checkpointed = trained(tree | {"gradient_checkpointing": True}, tmp_path / "checkpointed")
    assert same(checkpointed["a"], whole["a"]) and same(checkpointed["b"], whole["b"])
    spoil(monkeypatch)
    beside = trained(tree, tmp_path / "beside")
    assert same(beside["a"], whole["a"]) and not same(beside["b"], whole["b"])


def test_a_run_that_trains_output_layers_and_embeddings_is_one_without_graphs_and_has_its_bits_when_it_is_resumed(
    tree: Tree, tmp_path: Path
) -> None:
    a, b = tree["jobs"]
    a["adapter"] = {"r": 2, "target_modules": ["lm_head"], "lora_dropout": 0.1, "modules_to_save": ["embed_tokens"]}
    b["adapter"] = {"r": 2, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True, "lora_dropout": 0}
    plain, whole = trained(tree, tmp_path / "plain", graphs=False), trained(tree, tmp_path / "whole")
    for name in "ab":
        for key, tensor in whole[name].items():
            torch.testing.assert_close(tensor, plain[name][key], rtol=1e-3, atol=1e-4)
    trained(tree, tmp_path / "cut", max_steps=2)
    cut = trained(tree, tmp_path / "cut", resume_from=["a=1"])
    assert same(cut["a"], whole["a"]) and same(cut["b"], whole["b"])


@pytest.mark.soak
def test_graphs_are_recorded_anew_for_the_jobs_that_have_joined_and_left(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packlora.runtime.windows.Planner", partial(Planner, window_rounds=1))
    tree["jobs"][0]["train"]["num_train_epochs"] = 2
    c = {
        **tree["jobs"][1],
        "name": "c",
        "adapter": {"r": 5, "lora_dropout": 0.2, "target_modules": ["v_proj", "o_proj"]},
    }
    counts: list[int] = []

    def asking(out: Path) -> list[Subscriber]:
        add, stop = Add(kind="add", jobs=[c]).model_dump(), StopJob(kind="stop", job="b").model_dump()
        at = [at_window(1, lambda: request(out, add)), at_window(3, lambda: request(out, stop))]
        return [*at, lambda event: counts.append(len(RECORDED)) if isinstance(event, WindowPlanned) else None]

    tree["jobs"][1]["train"]["num_train_epochs"] = 2
    whole = trained(tree, tmp_path / "whole", more=asking(tmp_path / "whole"))
    assert counts[-1] > counts[4] > counts[2] > 0
    plain = trained(tree, tmp_path / "plain", graphs=False, more=asking(tmp_path / "plain"))
    for name in "abc":
        for key, tensor in whole[name].items():
            torch.testing.assert_close(tensor, plain[name][key], rtol=1e-3, atol=1e-4)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter of b is not finite from its second step on, in the microbatches of that step."""
    original: Callable[..., Any] = AdapterState.collect

    def collect(state: AdapterState, *args: Any) -> None:
        original(state, *args)
        if state.adapter.name == "b" and state.last_good is not None:
            with torch.no_grad():
                state.adapter.flat[:64] = torch.nan

    monkeypatch.setattr(AdapterState, "collect", collect)
