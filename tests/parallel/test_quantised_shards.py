"""Quantised base models on several processes, whole on each and shared by rows: the numbers and the codes of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import rows_into
from quantised import bnb  # noqa: F401 the package, without a compiler
from ranks import Ranks
from test_replicas import heard, same_run
from test_training import config, train

from packlora.commands.plan import make_plan
from packlora.config import Run
from packlora.parallel import sharded

Groups = Callable[[int], Ranks]
KINDS: dict[str, Any] = {
    "nf4": "nf4", "double": {"method": "nf4", "double_quant": True}, "fp4": "fp4", "int8": "int8",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_base: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """By kind the run file of a run that one device has ended: LoRA and DoRA jobs, with dropout."""
    made: dict[str, dict[str, Any]] = {}

    def make(kind: str) -> dict[str, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            tree = config(
                tiny_base("qwen2"), folder / "whole", rows_into(folder), dtype="float64", max_tokens_per_microbatch=70,
                quantization=KINDS[kind], save_every=1,
            )  # fmt: skip
            tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
            train(tree)
            made[kind] = tree
        return made[kind]

    return make


def heard_before_torch_2_12(rank: int, *args: Any) -> Any:
    """A run where FSDP takes only parameters that could have a gradient, as it is until then."""
    share = sharded.fully_shard

    def refusing(module: torch.nn.Module, **how: Any) -> Any:
        for parameter in module.parameters():
            parameter.detach().requires_grad_()  # raises of whole numbers
        return share(module, **how)

    with mock.patch.object(sharded, "fully_shard", refusing):
        return heard(rank, *args)


@pytest.mark.parametrize(
    ("processes", "kind", "parallel", "checkpointing"),
    [
        (2, "double", {"shard_base": True}, True),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [
                (2, "int8", {"shard_base": True}, False), (2, "nf4", {"shard_base": True, "offload_base": True}, False),
                (3, "fp4", {"shard_base": 3}, False), (2, "nf4", {"devices_per_job": 2}, False),
                (2, "int8", {"devices_per_job": 1}, True), (4, "nf4", {"shard_base": 2, "devices_per_job": 2}, True),
            ]
        ),
    ],
)  # fmt: skip
def test_processes_give_what_one_device_gives(
    processes: int, kind: str, parallel: dict[str, Any], checkpointing: bool, runs: Callable[[str], dict[str, Any]],
    ranks: Groups, tmp_path: Path,
) -> None:  # fmt: skip
    """Begun on several processes, and ended on one, which finds the same codes."""
    tree = runs(kind)
    one = {**tree, "output_dir": str(tmp_path / "out"), "gradient_checkpointing": checkpointing}
    assert (
        ranks(processes).run(heard_before_torch_2_12, {**one, "parallel": parallel}, "", 5, {})[0][0] == "interrupted"
    )
    assert heard(0, one, None, 0, {"resume": True})[0] == "done"
    same_run(tmp_path / "out", Path(tree["output_dir"]), 1e-10)


def test_the_plan_counts_the_codes_of_a_device(runs: Callable[[str], dict[str, Any]]) -> None:
    tree = runs("double")
    whole, shared = (
        make_plan(Run.model_validate({**tree, "parallel": parallel}), gpus=2)
        for parallel in ({"devices_per_job": 2, "shard_base": False}, {"shard_base": True})
    )
    assert whole.layouts is not None and shared.layouts is not None
    (one,), (part,) = ([row for row in plan.layouts.rows if row.layout.pipeline == 1] for plan in (whole, shared))
    numbers, codes = whole.prepared.in_codes
    floats = 8 * (whole.prepared.shape.parameters - numbers)
    layers = 2 * codes // whole.prepared.shape.layers  # that are gathered at a time
    assert numbers == whole.prepared.shape.linear_parameters and codes < numbers
    assert one.bytes - part.bytes == codes + floats - (codes + floats) // 2 - floats - layers
