"""Every public name as a user would use it: `make lint` checks its types, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import packlora
from packlora import (
    InputError,
    Plan,
    ProcessError,
    Report,
    Result,
    Run,
    WriteError,
    accelerate,
    callbacks,
    preview,
    restore,
    train,
)
from packlora.callbacks import ThroughputCallback


def use(model: Any, tree: dict[str, Any], run: Run, plan: Plan) -> tuple[Result, Report]:
    try:
        result = train(run, resume=True, max_steps=3)
        packlora.train(tree, overrides=["jobs.0.seed=1"])
        packlora.train(Path("run.yaml"), resume_from=["one=4"])
    except (InputError, ProcessError, WriteError) as error:
        print(str(error))
        raise
    for name, job in result.jobs.items():
        print(name.upper(), job.status.upper(), job.step + 1, job.folder / "adapter_model.safetensors")
    seed: int = run.seed_of(run.jobs[0])
    code: int = result.exit_code
    report = accelerate(model, plan=plan)
    restore(model)
    listed: list[Any] = [ThroughputCallback(), callbacks.ThroughputCallback(), packlora.callbacks.ThroughputCallback()]
    print(seed, code, report.accelerated, plan.name, listed, packlora.__version__.upper())
    assert_type(train("run.yaml"), Result)
    assert_type(accelerate(model), Report)
    for sample in preview(run, rows=3):
        print(sample.job.upper(), sample.row + sample.tokens + sample.labels)
        print([piece.text.upper() for piece in sample.pieces if piece.learnt])
    return result, report
