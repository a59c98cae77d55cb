"""Every layout on two GPUs: with every kind of job the numbers of one GPU, and under torchrun as users start it.

pytest tests/gpu/test_two_gpus.py -n 4 --dist worksteal
TWO_ON=cpu pytest tests/gpu/test_two_gpus.py        # the same table on two processes of a CPU

The processes of the table are started once and run all cases of a worker. Layouts and jobs are those of test_placement.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from conftest import rows_into, tiny_model
from peft import LoraConfig, get_peft_model
from ranks import Ranks
from test_placement import (
    BOUND,
    EXPERT_LAYOUTS,
    LARGER,
    LARGER_EXPERTS,
    LAYOUTS,
    check,
    dense_run,
    part_of,
    routed_run,
)
from test_replicas import same_run
from test_rewards_on_processes import four_jobs
from test_torchrun import ended, launch
from test_training import adapter, config, distance, train
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import packlora
from packlora.engine.recorded import Recorder
from packlora.parallel import gathers

DEVICE = "cuda" if torch.cuda.device_count() > 1 else os.environ.get("TWO_ON", "")
pytestmark = pytest.mark.skipif(not DEVICE, reason="needs two GPUs")
Groups = Callable[[int], Ranks]
Tree = dict[str, Any]
SECONDS = 60.0
"""After which a call of the processes is given up."""


def of_two(*tables: dict[str, tuple[int, Tree]]) -> dict[str, tuple[int, Tree]]:
    """Layouts of two processes, and one GPU at the end."""
    return {name: own for table in tables for name, own in table.items() if own[0] == 2} | {"one": (1, {})}


DENSE, EXPERTS = of_two(LAYOUTS, LARGER), of_two(EXPERT_LAYOUTS, LARGER_EXPERTS)
FEW: list[Tree] = [
    {"name": "lora", "adapter": {"r": 4, "lora_dropout": 0.1}, "train": {"global_batch_size": 4, "learning_rate": 1e-2}},
    {"name": "dora", "adapter": {"r": 3, "use_dora": True}, "train": {"global_batch_size": 3, "learning_rate": 1e-2}},
]  # fmt: skip


def meets(rank: int, device: str) -> float:
    """The sum of both ranks, by the device's own messages."""
    own = torch.full((1,), float(rank + 1), device=device)
    dist.all_reduce(own)
    return own.item()


@pytest.fixture(scope="module")
def two() -> Iterator[Groups]:
    """Two processes, each with a GPU. They take half a minute to start, which no case is charged with."""
    ranks = Ranks(2, DEVICE)
    assert ranks.run(meets, DEVICE) == [3.0, 3.0]
    ranks.run = partial(ranks.run, seconds=SECONDS)  # type: ignore[method-assign]
    yield lambda size: ranks
    ranks.close()


@pytest.fixture(scope="module")
def dense(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return dense_run(tmp_path_factory.mktemp("dense"), tokenizer, DEVICE)


@pytest.fixture(scope="module")
def routed(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return routed_run(tmp_path_factory.mktemp("routed"), tokenizer, DEVICE)


WIDTHS = (33, 1025, 7, 513, 511, 513, 33)


@mock.patch.object(gathers, "PIECE", 100_000)  # less than the largest layer's part
def gathered(rank: int, device: str) -> tuple[bool, list[float]]:
    """Whether layers of odd sizes are gathered by copies, and how far their outputs and gradients are from whole layers'. The
    processes run apart, each some layers ahead of the other now and then."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(WIDTHS)))
    whole = whole.to(device, torch.bfloat16).requires_grad_(False)
    model, mesh = copy.deepcopy(whole), DeviceMesh.from_group(dist.group.WORLD, torch.device(device).type)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not model)
    copies, errors = gathers.gather_by_copies([model, *model], dist.group.WORLD, next(whole.parameters()).device), []
    for number in range(12):
        x = torch.randn(3, WIDTHS[0], device=device, dtype=torch.bfloat16, requires_grad=True)
        if device == "cuda":
            torch.cuda._sleep(20_000_000 * ((number + rank) % 3))
        outputs = model(x), whole(x)
        gradients = [torch.autograd.grad(made.float().square().sum(), x)[0] for made in outputs]
        errors += [(a - b).abs().max().item() for a, b in (outputs, gradients)]
    return copies, errors


def test_layers_gathered_by_copies_are_whole(two: Groups) -> None:
    for copies, errors in two(2).run(gathered, DEVICE):
        assert copies == (DEVICE == "cuda") and len(errors) == 24 and not any(errors), errors


def test_jobs_with_rewards_draw_and_learn_on_two_as_on_one(
    two: Groups, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    asked = four_jobs(tiny_base("llama"), tmp_path) | {"device": DEVICE, "dtype": "float64"}
    parts = asked | {"output_dir": str(tmp_path / "two")}
    assert part_of(0, asked, {}) == "done"
    assert two(2).run(part_of, parts, {}) == ["done", "done"]
    for name in ("brief", "ahead", "faulty", "texts"):
        assert distance(adapter(tmp_path / "one", name), adapter(tmp_path / "two", name)) < BOUND
    drawn = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("rollouts/step-*"))
    assert len(drawn) == 12
    for path in drawn:
        texts = [json.loads((tmp_path / run / path).read_text())["completions"] for run in ("one", "two")]
        assert [own["ids"] for own in texts[0]] == [own["ids"] for own in texts[1]]


CHAIN: list[tuple[Tree, str, int]] = [
    ({"shard_base": True, "offload_base": True}, "kill", 1), ({"tensor": 2}, "term", 0), ({"pipeline": 2}, "none", 0),
]  # fmt: skip
"""Layouts, what happens there, and to which process."""


def test_stopped_and_killed_under_torchrun_it_goes_on_on_other_layouts(tiny_base: Any, tmp_path: Path) -> None:
    rows = rows_into(tmp_path)
    tree = config(tiny_base(), tmp_path / "one", rows, dtype="float64", max_tokens_per_microbatch=70, device=DEVICE)
    tree |= {"save_every": 1}
    train(tree)
    for at, (parallel, mishap, rank) in enumerate(CHAIN):
        words = ("--resume",) * (at > 0)
        code, said = ended(launch(None, {**tree, "parallel": parallel}, tmp_path / "out", mishap, rank, (), words), 120)
        wanted = {"kill": "Signal 9", "term": "SIGTERM", "none": ""}[mishap]
        assert (code == 0) == (mishap == "none") and wanted in said, f"{parallel}: {code}, {said[-2000:]}"
    same_run(tmp_path / "out", tmp_path / "one", BOUND)


def pairs_of(layouts: dict[str, Any]) -> list[Any]:
    """Routes from each layout to the next one; from the last to the first."""
    names = list(layouts)
    return [pytest.param(pair, id=" to ".join(pair)) for pair in zip(names, names[1:] + names[:1], strict=True)]


@pytest.mark.parametrize("route", pairs_of(DENSE))
def test_a_layout_gives_the_numbers_of_one_gpu(route: list[str], dense: Tree, two: Groups, tmp_path: Path) -> None:
    """Stopped after a step, and gone on with on the next layout."""
    found = check([DENSE[name] for name in route], dense, two, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]


@pytest.mark.parametrize("route", pairs_of(EXPERTS))
def test_a_layout_of_experts_gives_the_numbers_of_one_gpu(
    route: list[str], routed: Tree, two: Groups, tmp_path: Path
) -> None:
    found = check([EXPERTS[name] for name in route], routed, two, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]


@pytest.fixture(scope="module")
def few(tiny_base: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tree]:
    """Run files of two jobs that one GPU has ended, by family, dtype and quantization."""
    made: dict[Any, Tree] = {}

    def make(*kind: str | None) -> Tree:
        if kind not in made:
            family, dtype, quantization = kind
            folder = tmp_path_factory.mktemp("few")
            tree = config(
                tiny_base(family), folder / "one", rows_into(folder), json.loads(json.dumps(FEW)), dtype=dtype,
                quantization=quantization, max_tokens_per_microbatch=70, device=DEVICE,
            )  # fmt: skip
            assert part_of(0, tree, {}) == "done"
            made[kind] = tree
        return made[kind]

    return make


def trained(tree: Tree, parallel: Tree, two: Groups, out: Path) -> Path:
    """The folder of the same run on a layout of two processes."""
    assert two(2).run(part_of, {**tree, "output_dir": str(out), "parallel": parallel}, {}) == ["done", "done"]
    return out


@pytest.mark.parametrize("name", [name for name in DENSE if name != "one"])
def test_half_precision_trains(name: str, few: Callable[..., Tree], two: Groups, tmp_path: Path) -> None:
    """With the kernels, and graphs where there are any; losses are those of one GPU but for rounding."""
    tree = few("llama", "bfloat16", None)
    one, both = (losses(folder) for folder in (Path(tree["output_dir"]), trained(tree, DENSE[name][1], two, tmp_path)))
    assert one.keys() == both.keys()
    for key, loss in one.items():
        assert math.isclose(both[key], loss, rel_tol=0.02), (key, both[key], loss)


def recordings(rank: int, tree: Tree) -> int:
    """Number of CUDA graphs that a process records in a run."""
    functions: list[Any] = []
    record = Recorder.record

    def noted(self: Recorder, function: Callable[[], None]) -> Callable[[], None]:
        functions.append(function)
        return record(self, function)

    with mock.patch.object(Recorder, "record", noted):
        assert part_of(rank, tree, {}) == "done"
    return len(functions)


@pytest.mark.parametrize("sequence", [False, True])
def test_messages_between_slices_of_layers_are_recorded(
    sequence: bool, tiny_base: Any, two: Groups, tmp_path: Path
) -> None:
    """Losses are those of one GPU without graphs but for rounding. Each shape has a graph of its forward and one of its
    backward."""
    if DEVICE != "cuda":
        pytest.skip("a CPU has no graphs")
    jobs = [{**job, "adapter": {**job["adapter"], "lora_dropout": 0.1 * (job["name"] == "lora")}} for job in FEW]
    tree = config(
        tiny_base(), tmp_path / "one", rows_into(tmp_path), jobs, dtype="bfloat16", max_tokens_per_microbatch=70,
        device=DEVICE,
    )  # fmt: skip
    assert part_of(0, {**tree, "cuda_graphs": False}, {}) == "done"
    parallel = {"tensor": 2, "sequence_parallel": sequence}
    counts = two(2).run(recordings, {**tree, "output_dir": str(tmp_path / "two"), "parallel": parallel})
    assert counts[0] == counts[1] >= 2
    assert "no CUDA graphs" not in (tmp_path / "two" / "run.json").read_text()
    one, both = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == both.keys()
    for key, loss in one.items():
        assert math.isclose(both[key], loss, rel_tol=0.02), (key, both[key], loss)


def test_a_process_that_fails_where_graphs_hold_messages_ends_both(tiny_base: Any, tmp_path: Path) -> None:
    """At its third step, when the shape of all microbatches has its graphs."""
    tree = config(
        tiny_base(), tmp_path / "one", rows_into(tmp_path), FEW[:1], dtype="bfloat16", max_tokens_per_microbatch=70,
        device=DEVICE,
    )  # fmt: skip
    code, said = ended(launch(None, {**tree, "parallel": {"tensor": 2}}, tmp_path / "out", "raise", 1), 120)
    assert code != 0 and "process 1 of 2 failed: ValueError: a mishap" in said, said


def losses(folder: Path) -> dict[tuple[str, int], float]:
    return {(line["job"], line["step"]): line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").open())}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", {"shard_base": True}), ("llama", {"shard_base": True, "offload_base": True}),
        ("gemma2", {"shard_base": True, "offload_base": True}), ("qwen2", {"devices_per_job": 2}),
        ("qwen2", {"devices_per_job": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_a_quantised_base_gives_the_numbers_of_one_gpu(
    family: str, parallel: Tree, kind: str, few: Callable[..., Tree], two: Groups, tmp_path: Path
) -> None:
    """In codes that are whole on each GPU, shared by rows, and shared in the memory of the host; also where embedding and
    output layer are one."""
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    tree = few(family, "float64", kind)
    found = trained(tree, parallel, two, tmp_path / "two")
    assert furthest(found, Path(tree["output_dir"])) < BOUND


def furthest(out: Path, whole: Path) -> float:
    """Largest relative difference of the two jobs' losses and adapters."""
    ours, theirs = losses(out), losses(whole)
    assert ours.keys() == theirs.keys()
    found = [abs(ours[key] - loss) / loss for key, loss in theirs.items()]
    return max(*found, *(distance(adapter(out, job["name"]), adapter(whole, job["name"])) for job in FEW))


def test_a_third_process_is_refused_for_want_of_a_gpu(tiny_base: Any, tmp_path: Path) -> None:
    if torch.cuda.device_count() != 2:
        pytest.skip("counts on two GPUs")
    tree = config(tiny_base(), tmp_path / "one", rows_into(tmp_path), device=DEVICE)
    options = ("--standalone", "--nproc-per-node", "3")
    code, said = ended(launch(None, tree, tmp_path / "out", options=options), 120)
    assert code != 0 and "2 usable GPUs" in said, said


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-3)], ids=["float64", "float32"]
)
def test_layers_that_device_map_spreads_over_two_gpus_are_computed_here(
    dtype: torch.dtype, bound: float, use_dora: bool
) -> None:
    """By `accelerate`, in one process, with the gradients of PEFT; inputs go from one GPU to the other between the layers."""
    first, second = (0, 1) if DEVICE == "cuda" else ("cpu", "cpu")
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first, "model.layers.1": second}
    model = tiny_model("llama", dtype)
    model = dispatch_model(model, places | {"model.norm": second, "lm_head": second}, force_hooks=True)
    settings = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", use_dora=use_dora)
    model = get_peft_model(model, settings).train()
    ids = torch.arange(3, 17).view(2, 7).to(places["model.embed_tokens"])

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.grad is not None}

    want, report = gradients(), packlora.accelerate(model)
    got = gradients()
    assert report.accelerated == len(report.modules) == 14
    assert {(one.served, *one.left) for one in report.served().values()} == {(1,)}
    assert got.keys() == want.keys() and all(float(value.abs().max()) for value in want.values())
    assert max(float((got[name] - value).norm() / value.norm()) for name, value in want.items()) < bound
