"""Every public name as a user would use it: `make lint` checks its types, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import packlora
from packlora import (
    InputError,
    Job,
    JobResult,
    ProcessError,
    Report,
    Result,
    Run,
    Trainer,
    WriteError,
    accelerate,
    callbacks,
    events,
    generate,
    merge,
    preview,
    restore,
    train,
)
from packlora.callbacks import ThroughputCallback


def stop(event: events.Event) -> events.Stop | None:
    return events.Stop(event.job) if isinstance(event, events.Stepped) and event.loss > 9.0 else None


def use_objects(model: Any, rows: list[dict[str, Any]]) -> Path:
    jobs = [Job("one", data=rows, eval_data=0.1, adapter={"r": 8}, learning_rate=1e-4), Job("two", data="two.jsonl")]
    trainer = Trainer(model, jobs=jobs, output_dir="runs/mine", callbacks=[stop], seed=3)
    result = trainer.train(resume=True)
    one: JobResult = result["one"]
    print(
        one.path / "adapter_config.json", one.status.upper(), (one.eval_loss or 0.0) + 1, one.load(), trainer.run.seed
    )
    assert_type(generate(one, ["Hello"], temperature=0.5), list[str])
    return merge(one.path, "merged")


def use(model: Any, tree: dict[str, Any], run: Run) -> tuple[Result, Report]:
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
    report = accelerate(model, plan="chain")
    restore(model)
    listed: list[Any] = [ThroughputCallback(), callbacks.ThroughputCallback(), packlora.callbacks.ThroughputCallback()]
    print(seed, code, report.accelerated, listed, packlora.__version__.upper())
    assert_type(train("run.yaml"), Result)
    assert_type(accelerate(model), Report)
    for sample in preview(run, rows=3):
        print(sample.job.upper(), sample.row + sample.tokens + sample.labels)
        print([piece.text.upper() for piece in sample.pieces if piece.learnt])
    return result, report
