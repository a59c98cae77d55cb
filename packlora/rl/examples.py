"""Examples of what a job that learns from rewards writes, for the page and for trackers: the best and the worst completions of
a step, from its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packlora.rl.data import file_of

SHOWN = 3
"""Completions of each end."""


def examples(job: Path, step: int) -> list[dict[str, Any]]:
    """The best and the worst completions of a step by reward, the best first: each with `step`, `prompt`, `completion`,
    `reward`, `advantage` and `tokens`, by TRL's names. Completions whose rewards failed are left out, unless all did. There are
    none where the step has no file.

    Args:
        job: folder of the job.
        step: counted from 1.
    """
    try:
        tree = json.loads(file_of(job, step).read_text(encoding="utf-8"))
        prompts = tree.get("prompts", {})
        judged = [one for one in tree["completions"] if not one["is_lost"]] or tree["completions"]
        ranked = sorted(judged, key=lambda one: -one["reward"])
        shown = ranked if len(ranked) <= 2 * SHOWN else ranked[:SHOWN] + ranked[-SHOWN:]
        return [
            {
                "step": step, "prompt": prompts.get(str(one["prompt"]), ""), "completion": one["text"],
                "reward": one["reward"], "advantage": one["advantage"], "tokens": len(one["ids"]),
            }
            for one in shown
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
