"""Systems that lack what Linux has. A run on one of them has never been tried; this takes the same things away."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from test_training import config, train
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import packlora
from packlora import portable
from packlora.adapters.linear import Attached
from packlora.base.packing import prepare_model
from packlora.cli import app
from packlora.engine import memory
from packlora.engine.adapters import AdapterState
from packlora.engine.draw import _inverse
from packlora.engine.generate import sample, sampler_for
from packlora.engine.library_sampler import LibrarySampler
from packlora.engine.objective import RowsView
from packlora.engine.objectives.policy import POLICY_LOSSES, PolicyObjective
from packlora.engine.passes import SingleDevice
from packlora.engine.sampling import SampleRequest
from packlora.ops import wide
from packlora.runtime import estimate
from packlora.runtime.prepared_job import AUTO_BUDGET

Rows = Callable[..., str]
Base = Callable[..., str]


@pytest.mark.parametrize(
    ("name", "found"), [("aux", "device"), ("Com1.x", "device"), ("a.", "dot"), ("auxiliary", None)]
)
def test_a_job_whose_folder_windows_would_not_make_is_refused_there(
    name: str, found: str | None, tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> packlora.Run:
        return packlora.Run.model_validate(config("a", tmp_path, lambda *a, **b: "rows.jsonl", [{"name": name}]))

    read()
    monkeypatch.setattr(portable, "IS_WINDOWS", True)
    if found is None:
        read()
    else:
        with pytest.raises(ValueError, match=found):
            read()


def test_a_plan_says_so_where_the_system_does_not_tell_how_much_memory_is_free(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows and on a Mac, which have no /proc."""

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("/proc/meminfo")

    file = tmp_path / "run.json"
    file.write_text(json.dumps(config(tiny_base(), tmp_path / "out", write_rows)))
    for has_proc, told in ((True, "GiB free"), (False, "GiB; this system does not say how much is free")):
        if not has_proc:
            monkeypatch.setattr(memory, "open", missing, raising=False)
        said = " ".join(CliRunner().invoke(app, ["plan", str(file)]).output.split())
        assert told in said and ("GiB free" in said) == has_proc, said


class NoFloat64(TorchDispatchMode):
    """Raises where a tensor of float64 comes up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64:
                raise TypeError(f"{func} made a float64 tensor, which mps has none of")
        return out


def without_float64(call: Callable[..., Any]) -> Callable[..., Any]:
    def own(*args: Any, **named: Any) -> Any:
        with NoFloat64():
            return call(*args, **named)

    return own


def test_a_run_makes_no_float64_tensor_on_a_device_that_has_none(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in the place of mps: what runs there may make none, and the numbers are those of float64 up to rounding."""
    jobs: list[dict[str, Any]] = [
        {"name": "dora", "adapter": {"r": 2, "use_dora": True, "lora_dropout": 0.1}}, {"name": "dpo", "adapter": {"r": 2}},
    ]  # fmt: skip
    for job in jobs:
        path = write_rows(f"rows-of-{job['name']}", 4)
        job |= {"data": {"path": path, "eval_path": path}, "train": {"global_batch_size": 4, "max_steps": 2}}
    rows = [{"prompt": "a b", "chosen": f"c {n}", "rejected": "d e"} for n in range(4)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    jobs[1]["train"]["trainer"] = "dpo"
    told = []
    for without in (False, True):
        if without:
            monkeypatch.setattr(wide, "WITHOUT_FLOAT64", {"cpu"})
            for owner, names in (
                (SingleDevice, ("forward", "backward", "evaluate")),
                (AdapterState, ("collect", "step", "square", "no_sums", "accept", "close", "discard")),
            ):
                for name in names:
                    monkeypatch.setattr(owner, name, without_float64(getattr(owner, name)))
        result = train(config(tiny_base(), tmp_path / str(without), write_rows, jobs))
        told.append([[job.eval_before, job.eval_after] for job in result.jobs.values()])
    np.testing.assert_allclose(told[0], told[1], rtol=1e-6)


def test_samples_are_drawn_without_a_float64_tensor_on_a_device_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache, whose proof needs none either, and by transformers' own generation."""
    model = tiny_model("llama", torch.float32)
    prepare_model(model, False)
    requests = [
        SampleRequest((5, 6, 7), max_tokens=6, seed=3, num_samples=2, prompt_logprobs=True),
        SampleRequest((8, 9), max_tokens=6, seed=4, top_k=9, top_p=0.9, entropy=True),
        SampleRequest((5, 9), max_tokens=6, temperature=0.0, top_sampled=2),
    ]

    def tokens() -> list[Any]:
        found, reason = sampler_for(model, Attached([]), context=64)
        assert reason is None
        both = [sample(one, requests) for one in (found, LibrarySampler(model, Attached([]), context=64))]
        return [[[one.id for one in own] for own in request] for request in both[0] + both[1]]

    want = tokens()
    monkeypatch.setattr(wide, "WITHOUT_FLOAT64", {"cpu"})
    assert without_float64(tokens)() == want


def test_no_token_of_probability_0_is_drawn_by_a_number_that_rounds_to_1_in_float32() -> None:
    logp = torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert _inverse(logp, torch.ones(1)).tolist() == [1]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_of_policies_are_computed_without_float64_too(name: str) -> None:
    objective, generator = PolicyObjective(name, kl=0.1, over="samples"), np.random.default_rng(0)
    told = []
    given = {column: generator.random(5) for column in (*objective.columns, "logp")}
    for dtype in (torch.float64, torch.float32):
        columns = {column: torch.from_numpy(values).to(dtype) for column, values in given.items()}
        logp = columns.pop("logp").requires_grad_()
        view = RowsView((2, 3), {"units": 5, "samples": 2}, {}, columns)
        losses, sums = (
            objective.loss(logp, view) if dtype == torch.float64 else without_float64(objective.loss)(logp, view)
        )
        losses.sum().backward()
        assert logp.grad is not None and losses.dtype == sums.dtype == dtype
        told.append([one.detach().double().numpy() for one in (losses, sums, logp.grad)])
    for want, found in zip(*told, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_every_figure_that_a_plan_takes_by_the_kind_of_device_is_there_for_all_three() -> None:
    for figures in (estimate.PRODUCTS_SHARE, estimate.PLANNED_FLOPS, estimate.LAYER_SECONDS, AUTO_BUDGET):
        assert figures.keys() == {"cpu", "cuda", "mps"}


def test_a_rename_waits_for_a_reader_where_the_system_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "IS_WINDOWS", True)
    monkeypatch.setattr(portable, "BETWEEN", 0.0)
    original, left = os.replace, [3]

    def refused(*paths: Path) -> None:
        if left[0]:
            left[0] -= 1
            raise PermissionError(13, "in use")
        original(*paths)

    monkeypatch.setattr(os, "replace", refused)
    (tmp_path / "a").write_text("new", encoding="utf-8")
    portable.replace(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text(encoding="utf-8") == "new"
    left[0] = 1000
    with pytest.raises(PermissionError):
        portable.replace(tmp_path / "b", tmp_path / "c")
