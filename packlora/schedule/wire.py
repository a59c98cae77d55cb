"""Tasks and windows as JSON, for the pipes between the scheduler's processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from packlora.schedule.cost import CostModel
from packlora.schedule.solve import JobRounds, Task
from packlora.schedule.types import Carry, Microbatch, PackReport, Placed, Window, WindowReport


def task_to_json(task: Task) -> dict[str, Any]:
    """A tree of lists, mappings and numbers."""
    return asdict(task)


def task_from_json(tree: dict[str, Any]) -> Task:
    """The task, equal to the one that the tree was made from."""
    jobs = tuple(
        JobRounds(
            job["name"], job["first_batch"], job["first_round"],
            tuple(tuple((sample, length) for sample, length in batch) for batch in job["batches"]),
        )
        for job in tree["jobs"]
    )  # fmt: skip
    cost = tree["cost"]
    if cost is not None:
        cost = CostModel(**{**cost, "stage_shares": tuple(cost["stage_shares"])})
    return Task(**{**tree, "jobs": jobs, "cost": cost})


def window_to_json(window: Window) -> dict[str, Any]:
    """A tree of lists, mappings and numbers."""
    return {
        "first_round": window.first_round,
        "num_rounds": window.num_rounds,
        "microbatches": [
            [[[item.job, item.batch, item.sample, item.length] for item in microbatch.samples], microbatch.completes]
            for microbatch in window.microbatches
        ],
        "report": asdict(window.report),
        "slots_since": dict(window.carry.slots_since),
    }


def window_from_json(tree: dict[str, Any]) -> Window:
    """The window, equal to the one that the tree was made from."""
    report = tree["report"]
    return Window(
        tree["first_round"],
        tree["num_rounds"],
        tuple(
            Microbatch(tuple(Placed(*item) for item in samples), tuple((job, batch) for job, batch in completes))
            for samples, completes in tree["microbatches"]
        ),
        WindowReport(
            **{
                **report,
                "groups": tuple(map(tuple, report["groups"])),
                "packs": tuple(PackReport(**pack) for pack in report["packs"]),
                "notes": tuple(report["notes"]),
            }
        ),
        Carry(tree["slots_since"]),
    )
