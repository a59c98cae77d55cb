"""Jobs with preferences on several processes, replicas or a base in parts: what one device gives."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import Ranks
from seeds import SOAK
from test_preference import alike, jobs, mixed  # noqa: F401 a fixture
from test_training import adapter, distance, steps, train

import packlora
from packlora.runtime.evaluate import Evaluator


def changed(rank: int, tree: dict[str, Any], asked: bool) -> str:
    """A run in which the second process alone is asked to stop while a divergence is looked for, or in which none is."""
    original, count = Evaluator.learn, 0

    def learn(self: Evaluator, due: Any) -> bool:
        nonlocal count
        count += any(job.learning.lacks_estimate(batch) for job, batch in due)
        if asked and rank == 1 and count == 2:
            signal.raise_signal(signal.SIGTERM)
        return not asked or original(self, due)

    with mock.patch.object(Evaluator, "learn", learn):
        return packlora.train(tree).status


def test_stages_that_are_asked_to_stop_while_they_look_for_a_divergence_go_on_on_one_device(
    tiny_base: Callable[..., str],
    jobs: list[dict[str, Any]],  # noqa: F811
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    """In the middle of a pipeline, before the second global batch of the job with a divergence; under `make soak` the
    comparison sees stages that look for none."""
    chosen = mixed(tiny_base("llama"), tmp_path / "whole", jobs, dtype="float64", eval_every=0)
    chosen["jobs"] = [job for job in chosen["jobs"] if job["name"] in ("mixed", "kto")]
    train(chosen)
    staged = chosen | {"parallel": {"pipeline": 2}, "output_dir": str(tmp_path / "out")}
    assert ranks(2).run(changed, staged, True) == ["interrupted"] * 2
    assert max(line["step"] for line in steps(tmp_path / "out")) < 3
    train(chosen | {"output_dir": str(tmp_path / "out")}, resume=True)
    for name in ("mixed", "kto"):
        alike(tmp_path / "out", tmp_path / "whole", name)
    if not SOAK:
        return
    wrong = staged | {"output_dir": str(tmp_path / "wrong"), "jobs": chosen["jobs"][-1:]}
    assert ranks(2).run(changed, wrong, False) == ["done"] * 2
    assert distance(adapter(tmp_path / "wrong", "kto"), adapter(tmp_path / "whole", "kto")) > 1e-6
