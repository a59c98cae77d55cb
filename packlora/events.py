"""Events of a run in training, which callbacks of `packlora.Trainer` and subscribers of `packlora.train` receive.

    from packlora import events

    def patience(event):  # a stopping rule
        if isinstance(event, events.Evaluated) and event.eval_loss > 3.0 and event.step > 100:
            return events.Stop(event.job, "its held-out loss stays high")

    packlora.Trainer(model, jobs, output_dir="runs/mine", callbacks=[patience]).train()

`ThroughputCallback`, a callback for transformers' own Trainer, is here too; it is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packlora.report.events import (
    CheckpointBegins,
    CheckpointSaved,
    Evaluated,
    Event,
    JobAtStart,
    JobDone,
    JobFailed,
    JobJoined,
    MemoryRanOut,
    MicrobatchDone,
    Note,
    PipelineRan,
    RunBegan,
    RunEnded,
    Sampled,
    SavePointReached,
    Stepped,
    Stop,
    StopAsked,
    Subscriber,
    TrainingBegan,
    WindowPlanned,
)

if TYPE_CHECKING:
    from packlora.callbacks import ThroughputCallback

__all__ = [
    "CheckpointBegins", "CheckpointSaved", "Evaluated", "Event", "JobAtStart", "JobDone", "JobFailed", "JobJoined",
    "MemoryRanOut", "MicrobatchDone", "Note", "PipelineRan", "RunBegan", "RunEnded", "Sampled", "SavePointReached", "Stepped",
    "Stop", "StopAsked", "Subscriber", "ThroughputCallback", "TrainingBegan", "WindowPlanned",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "ThroughputCallback":
        raise AttributeError(f"module 'packlora.events' has no attribute {name!r}; it has {', '.join(__all__)}")
    from packlora.callbacks import ThroughputCallback

    return ThroughputCallback
