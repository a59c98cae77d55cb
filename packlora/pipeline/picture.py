"""The simulated timeline of a plan as a picture: a row per pipeline stage, a box per forward and backward, by job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packlora.errors import needed
from packlora.pipeline.timeline import simulate
from packlora.report.charts import LIGHT
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch

BACKWARD = 0.55
"""Opacity of a backward; a forward is opaque."""
NAMED = 16
"""Jobs in the legend; more would hide the picture."""


def draw(microbatches: Sequence[Microbatch], cost: CostModel, title: str, path: Path) -> None:
    """Write the picture; its format is that of the path's suffix.

    A box is split by the tokens of the jobs that share it.

    Raises:
        InputError: matplotlib is not installed.
        OSError, ValueError: it cannot be written, or not as this kind.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise needed("matplotlib", "plot", "the picture of a timeline") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    timeline = simulate(microbatches, cost)
    names = list(dict.fromkeys(placed.job for microbatch in microbatches for placed in microbatch.samples))
    colours = {name: LIGHT[number % len(LIGHT)] for number, name in enumerate(names)}
    shares = [{name: count / one.num_tokens for name, count in one.tokens_by_job.items()} for one in microbatches]
    figure, axis = pyplot.subplots(figsize=(14, 1.6 + 0.7 * cost.devices), layout="constrained")
    for span in timeline.spans:
        bottom = span.stage - 0.4
        for name, share in shares[span.microbatch].items():
            axis.barh(
                bottom, span.end - span.start, 0.8 * share, span.start, align="edge", color=colours[name],
                alpha=1.0 if span.kind == "forward" else BACKWARD, edgecolor="white", linewidth=0.3,
            )  # fmt: skip
            bottom += 0.8 * share
    axis.set_yticks(range(cost.devices), [f"stage {number}" for number in range(cost.devices)])
    axis.invert_yaxis()
    axis.set_xlim(0, timeline.makespan)
    axis.set_xlabel("seconds")
    axis.set_title(f"{title}: {timeline.bubble:.1%} bubble", loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    handles = [Patch(color=colours[name], label=name) for name in names[:NAMED]]
    handles += [Patch(color="grey", label="forward"), Patch(color="grey", alpha=BACKWARD, label="backward")]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
