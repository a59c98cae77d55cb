"""Runs as torchrun starts them, on one node and on two: processes that raise, die, hang and are stopped. Under `make soak` each
process is a Python of its own; else torchrun and what it starts are forks of one that has everything imported (forked.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import rows_into
from forked import Forks
from seeds import SOAK, some
from test_replicas import same_run, whole
from test_training import config, train
from waiting import own_port

__all__ = ["whole"]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tree(tiny_base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torchrun")
    out = config(tiny_base(), folder / "whole", rows_into(folder), dtype="float64", max_tokens_per_microbatch=70)
    return out | {"save_every": 1}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks | None]:
    if SOAK:
        yield None
        return
    with Forks(
        tmp_path_factory.mktemp("forks"), ["launched", "torch.distributed.run", "packlora.report.summary"]
    ) as forks:
        yield forks


def environment() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    places = [str(HERE.parents[1]), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}


def launch(
    forks: Forks | None,
    tree: dict[str, Any],
    out: Path,
    mishap: str = "none",
    rank: int | str = 1,
    options: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """A run on two processes, as a command; options are torchrun's, words the run's."""
    file = out.parent / "run.yaml"
    file.write_text(yaml.safe_dump({**tree, "output_dir": str(out)}))
    where = options or ("--standalone", "--nproc-per-node", "2")
    what = [mishap, str(rank), "train", str(file), *words]
    pipes: dict[str, Any] = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if forks is not None:
        return forks.start("torch.distributed.run", *where, *forks.words("launched", *what), **pipes)
    command = [sys.executable, "-m", "torch.distributed.run", *where, str(HERE / "launched.py"), *what]
    return subprocess.Popen(command, text=True, **pipes)


def start(forks: Forks | None, what: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """A process of a run without torchrun."""
    pipes: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if forks is not None:
        return forks.start("launched", *what, **pipes)
    return subprocess.Popen([sys.executable, str(HERE / "launched.py"), *what], text=True, **pipes)


def ended(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still there after {seconds} s: {process.communicate()[0][-4000:]}") from None
    return process.returncode, said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mishap", "rank", "parallel", "says"),
    some(
        [
            ("kill", 0, {"devices_per_job": 2}, "Signal 9"), ("kill", 1, {"pipeline": 2}, "Signal 9"),
            ("raise", 0, {"pipeline": 2}, "a mishap, for this test"), ("term", 1, {"pipeline": 2}, "SIGTERM"),
            ("kill", 1, {"devices_per_job": 1}, "Signal 9"), ("raise", 1, {"devices_per_job": 1}, "a mishap, for this test"),
            ("hang", 1, {"devices_per_job": 2, "timeout_s": 6}, "waited in vain"),
            ("raise", 0, {"devices_per_job": 2}, "a mishap, for this test"), ("term", 0, {"devices_per_job": 2}, "SIGTERM"),
            ("raise", 1, {"tensor": 2}, "process 1 of 2 failed: ValueError: a mishap"), ("term", 0, {"tensor": 2}, "SIGTERM"),
            ("kill", 1, {"shard_base": True}, "process 0 of 2 waited in vain"),
        ],
        one_in=12,
    ),
)  # fmt: skip
def test_what_ends_one_process_ends_the_run_and_it_goes_on_from_there(
    mishap: str,
    rank: int,
    parallel: dict[str, int],
    says: str,
    tree: dict[str, Any],
    whole: Path,
    forks: Forks | None,
    tmp_path: Path,
) -> None:
    split = {**tree, "parallel": parallel}
    code, said = ended(launch(forks, split, tmp_path / "out", mishap, rank))
    assert code != 0
    assert says in said, said
    assert said.count("packlora: process") <= 1, said
    json.loads((tmp_path / "out" / "run.json").read_text())
    packlora_resumes = train({**tree, "output_dir": str(tmp_path / "out")}, resume=True)
    assert packlora_resumes.status == "done"
    same_run(tmp_path / "out", whole, 1e-10)


REPLICAS_OF_TWO = {"tensor": 2, "devices_per_job": 4}
CHAINS = (
    [
        (4, REPLICAS_OF_TWO, "kill", 3), (2, {"shard_base": True}, "term", 0),
        (4, {"tensor": 2, "devices_per_job": 2}, "kill", 0),
    ],
    [(2, {"shard_base": True}, "kill", 1), (4, REPLICAS_OF_TWO, "term", 2), (3, {"shard_base": True}, "kill", 0)],
    [(4, {**REPLICAS_OF_TWO, "sequence_parallel": True}, "kill", 0), (2, {"tensor": 2}, "kill", 1), (2, {}, "term", 1)],
)  # fmt: skip
"""Processes, layout, what happens to which process."""


@pytest.mark.soak
@pytest.mark.parametrize("chain", CHAINS, ids=range(len(CHAINS)))
def test_stopped_and_killed_again_and_again_it_goes_on_on_other_layouts(
    chain: list[tuple[int, dict[str, Any], str, int]],
    tree: dict[str, Any],
    whole: Path,
    forks: Forks | None,
    tmp_path: Path,
) -> None:
    for at, (processes, parallel, mishap, rank) in enumerate(chain):
        options = ("--standalone", "--nproc-per-node", str(processes))
        words = ("--resume",) * (at > 0)
        split = {**tree, "parallel": parallel}
        code, said = ended(launch(forks, split, tmp_path / "out", mishap, rank, options, words), 400)
        assert code != 0, f"{parallel}: it ended before anything happened: {said[-2000:]}"
        assert ("Signal 9" if mishap == "kill" else "SIGTERM") in said, said
    assert train({**tree, "output_dir": str(tmp_path / "out")}, resume=True).status == "done"
    same_run(tmp_path / "out", whole, 1e-10)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parallel", "says"),
    some(
        [
            ({"devices_per_job": 2}, "waited in vain"), ({"pipeline": 2}, "waited in vain"),
            ({"devices_per_job": 1}, "process 1 of 2 gives no sign of life"),
        ],
        one_in=2,
    ),
)  # fmt: skip
def test_a_process_that_hangs_is_given_up(
    parallel: dict[str, int], says: str, tree: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """Without torchrun, which waits half a minute for what hangs to end."""
    split = {**tree, "parallel": {**parallel, "timeout_s": 6}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**split, "output_dir": str(tmp_path / "out")}))
    processes, port = [], str(own_port())
    for rank in range(2):
        env = environment() | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }  # fmt: skip
        processes.append(start(None, ["hang", "1", "train", str(tmp_path / "run.yaml")], env))
    code, said = ended(processes[0])
    processes[1].kill()
    processes[1].communicate()
    assert code == 1
    assert says in said, said


@pytest.mark.soak
def test_torchrun_starts_it_again_and_it_goes_on(
    tree: dict[str, Any], whole: Path, forks: Forks | None, tmp_path: Path
) -> None:
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    code, said = ended(launch(forks, tree, tmp_path / "out", "once", 1, options))
    assert code == 0, said
    same_run(tmp_path / "out", whole, 1e-10)


def agent(port: int) -> tuple[str, ...]:
    """Options of one of two agents that find one another at a port."""
    return (
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-id", "test", "--max-restarts", "1", "--monitor-interval", "0.05",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "mishap"),
    [
        ({"pipeline": 2}, "once"),
        pytest.param({}, "none", marks=pytest.mark.soak),
        pytest.param({}, "once", marks=pytest.mark.soak),
        pytest.param({"devices_per_job": 2}, "once", marks=pytest.mark.soak),
    ],
)
def test_two_nodes_train_as_one_also_after_a_process_of_one_has_died(
    parallel: dict[str, int], mishap: str, tree: dict[str, Any], whole: Path, forks: Forks | None, tmp_path: Path
) -> None:  # fmt: skip
    """Two agents of torchrun; the one whose process has not died is told of no restart."""
    options = agent(own_port())
    split = {**tree, "parallel": parallel}
    nodes = [launch(forks, split, tmp_path / "out", mishap, options=options) for _ in range(2)]
    told = [ended(node) for node in nodes]
    assert [code for code, _ in told] == [0, 0], told
    same_run(tmp_path / "out", whole, 1e-10)
    both = "".join(said for _, said in told)
    assert both.count("report.html") == 1, both
    assert ("exitcode: -9" in both) == (mishap == "once"), both


@pytest.mark.soak
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}])
def test_a_node_that_died_is_replaced_and_the_run_goes_on(
    parallel: dict[str, int], tree: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second: the agents meet at the first. No agent is told of a restart, and with torch's own setting a new one would not
    be told where processes meet."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = agent(own_port())
    split = {**tree, "parallel": parallel | {"timeout_s": 20}}
    begin = partial(launch, None, split, tmp_path / "out", options=options, words=("--resume",))
    first = begin()
    time.sleep(5)  # so that the others meet there
    assert ended(begin("node", "any"))[0] == -9
    nodes = [first, begin()]
    told = [ended(node) for node in nodes]
    assert [code for code, _ in told] == [0, 0], told
    same_run(tmp_path / "out", whole, 1e-10)


def test_a_process_that_waits_in_vain_for_the_others_names_them(
    tree: dict[str, Any], forks: Forks | None, tmp_path: Path
) -> None:
    port = str(own_port())
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**tree, "output_dir": str(tmp_path / "out"), "parallel": {"timeout_s": 1}})
    )
    processes = []
    for rank in ("0", "2"):
        env = environment() | {"RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(start(forks, ["waits", "2", "train", str(tmp_path / "run.yaml")], env))
    for rank, process in zip((0, 2), processes, strict=True):
        code, said = ended(process)
        assert code == 1
        assert (
            f"process {rank} of 4 waited 1 s for the others at 127.0.0.1:{port}; these processes have not come: 1, 3"
            in said
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words", "says"), [({"dtype": "float61"}, (), "float61"), ({}, ("--from", "3"), "--resume")]
)
def test_bad_input_is_said_once(
    changes: dict[str, Any],
    words: tuple[str, ...],
    says: str,
    tree: dict[str, Any],
    forks: Forks | None,
    tmp_path: Path,
) -> None:
    """By the first process, however long it takes for that: torchrun ends it as soon as the other one has ended."""
    code, said = ended(launch(forks, {**tree, **changes}, tmp_path / "out", "late", 0, words=words))
    assert code != 0
    assert said.count(says) == 1, said
    assert "exitcode  : 2" in said
    assert not (tmp_path / "out").exists()
