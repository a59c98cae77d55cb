"""Events of a run in training, which callbacks of `packlora.Trainer` and subscribers of `packlora.train` receive.

    from packlora import events

    def patience(event):  # a stopping rule
        if isinstance(event, events.Evaluated) and event.eval_loss > 3.0 and event.step > 100:
            return events.Stop(event.job, "its held-out loss stays high")

    packlora.Trainer(model, jobs, output_dir="runs/mine", callbacks=[patience]).train()

`ThroughputCallback`, a callback for transformers' own Trainer, is here too; it is imported when it is first used. Events hold
plain values; steps count from 1, and step 0 is before the first. runtime/ emits them, report/ shows them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from packlora.result import Result

__all__ = [
    "CheckpointBegins", "CheckpointSaved", "Evaluated", "Event", "JobAtStart", "JobDone", "JobFailed", "JobJoined",
    "MemoryRanOut", "MicrobatchDone", "Note", "PipelineRan", "RunBegan", "RunEnded", "Sampled", "SavePointReached", "Stepped",
    "Stop", "StopAsked", "Subscriber", "ThroughputCallback", "TrainingBegan", "WindowPlanned",
]  # fmt: skip

ThroughputCallback: Any


@dataclass(frozen=True, slots=True)
class JobAtStart:
    """A job when a session begins. num_steps, tokens: of all its optimizer steps, those of earlier sessions included."""

    name: str
    status: Literal["running", "done", "failed"]
    step: int
    num_steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RunBegan:
    """A session begins, with a fresh run or a resumed one.

    run: the run's id, the same in every session. config: the run file with every default. notes: what to tell before training;
    they are in run.json already. earlier: steps and held-out losses up to where the jobs go on, as earlier sessions told them,
    in the order of time; what came after the jobs' checkpoints is not among them, for it is trained and told again.
    """

    run: str
    output_dir: Path
    config: Mapping[str, Any]
    jobs: tuple[JobAtStart, ...]
    notes: tuple[str, ...] = ()
    earlier: tuple[Stepped | Evaluated, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingBegan:
    """The held-out losses before the first step are known; from here on time is training. compiles: the first microbatch may
    have to compile kernels."""

    compiles: bool = False


@dataclass(frozen=True, slots=True)
class WindowPlanned:
    """A window is about to be trained on: a line of windows.jsonl.

    window: its first round. bound: no schedule has fewer microbatches; gap: share above it. stopped: why the solver ended.
    seconds: of planning; predicted: seconds of its microbatches. group: of the processes that train it.
    """

    window: int
    rounds: int
    method: str
    capacity: int
    microbatches: int
    noops: int
    bound: int
    gap: float
    stopped: str
    seconds: float
    predicted: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class MicrobatchDone:
    """Forward and backward of a microbatch are done: a line of microbatches.jsonl.

    batches: global batch by job. capacity: the token budget. tokens, samples: by job. seconds: with the steps that it
    completes; on a GPU, which is waited for where a job steps, one without a step ends when it is launched, and its time is in
    that of the next.
    predicted: seconds without steps. rank: of the process that ran it, among those that train these jobs. elapsed: at its end,
    since the run began, over all sessions. memory: bytes then, that torch holds on the GPU or the process has on a CPU. gpu:
    share of the last moments in which the GPU computed, from NVML; None on a CPU or without nvidia-ml-py.
    """

    index: int
    window: int
    slot: int
    round: int
    batches: Mapping[str, int]
    capacity: int
    tokens: Mapping[str, int]
    samples: Mapping[str, int]
    seconds: float
    predicted: float
    rank: int = 0
    elapsed: float = 0.0
    memory: int = 0
    gpu: float | None = None


@dataclass(frozen=True, slots=True)
class PipelineRan:
    """A pipeline ran from empty to empty: a line of pipeline.jsonl.

    window: first round of the window in which it began. noops: slots without a microbatch. seconds: from the first forward to
    the last backward, predicted without messages; busy: of each stage. bubble: share of the stages' time in which they wait.
    mfu: floating-point operations a second over those of as many matrix products as there are stages. peak_memory: bytes on
    each stage. Of the longest one so far: jobs, by slot the tokens of each; spans and predicted_spans, (stage, forward or
    backward, slot, start, end), seconds since the first. group: of the processes that train it.
    """

    window: int
    slots: int
    noops: int
    tokens: int
    seconds: float
    busy: tuple[float, ...]
    bubble: float
    predicted_seconds: float
    predicted_bubble: float
    mfu: float
    peak_memory: tuple[int, ...]
    jobs: tuple[Mapping[str, int], ...] = ()
    spans: tuple[tuple[int, str, int, float, float], ...] = ()
    predicted_spans: tuple[tuple[int, str, int, float, float], ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class Stepped:
    """A job took an optimizer step: a line of metrics.jsonl.

    loss: mean over the label tokens of its global batch, or over its samples with preferences. grad_norm: before clipping.
    tokens: of the global batch. seconds: of the step; elapsed: since the run began, over all sessions. metrics: what
    else is told of preferences, by TRL's names (rewards/accuracies), of a load-balancing loss (aux_loss), and in float16 of the
    loss scale (loss_scale; overflow is 1 where the step was skipped, and grad_norm NaN), keys of the same line; null where it
    is not finite.
    """

    job: str
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    elapsed: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out loss of a job, mean over label tokens, or over samples with preferences: a line of evals.jsonl. It may be
    NaN or infinite. metrics: what else is told of preferences and rewards, by TRL's names, keys of the same line;
    null where it is not finite."""

    job: str
    step: int
    eval_loss: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Texts that a job's adapter generated for its sample_prompts at an evaluation: a line of samples.jsonl. samples: `prompt`
    and `text` of each prompt, in their order."""

    job: str
    step: int
    samples: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class CheckpointBegins:
    """Event before a checkpoint of a job is written, beside training; logs up to it must be on the disk before it."""

    job: str
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete and on the disk; told before the job's next one, or sooner."""

    job: str
    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class SavePointReached:
    """Event after a save point: all checkpoints that were due together are being written, and the adapters of jobs that have
    ended are on the disk."""


@dataclass(frozen=True, slots=True)
class MemoryRanOut:
    """A microbatch of so many tokens did not fit; the rest is planned with another token budget, or computed with gradient
    checkpointing, by this value of the key."""

    tokens: int
    budget_before: int
    budget: int
    gradient_checkpointing: bool | str | None = None

    @property
    def text(self) -> str:
        out = f"out of memory in a microbatch of {self.tokens} tokens: "
        if self.gradient_checkpointing is not None:
            value = str(self.gradient_checkpointing).lower()
            return out + f"gradient_checkpointing is {value} from now on, which takes time and changes no number"
        return out + f"max_tokens_per_microbatch goes from {self.budget_before} to {self.budget}"


@dataclass(frozen=True, slots=True)
class JobJoined:
    """A job joins the run in `round`, which is next. num_steps, tokens: of all its optimizer steps. config: as of a run file,
    with every default."""

    job: str
    round: int
    num_steps: int
    tokens: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job ends with the adapter of `step`; others, if there are any, go on."""

    job: str
    step: int
    reason: str

    @property
    def text(self) -> str:
        return f"job {self.job!r} was stopped: {self.reason}"


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job's finished adapter is in `folder`. stopped: why it ended before its last step, None where it did not."""

    job: str
    step: int
    folder: Path
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Note for a person; run.json keeps it among its warnings."""

    text: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The run ends after the present microbatch, and saves. by: a signal or a subscriber. hint: what else can be done."""

    by: str
    hint: str = ""

    @property
    def text(self) -> str:
        return f"{self.by}: finishing the present microbatch, then saving{self.hint}"


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The session has ended; not told where an error or a second Ctrl-C broke it off.

    result: what packlora.train returns. seconds, tokens: of all sessions. peak_memory: bytes, on the GPU or of the process.
    """

    result: Result
    seconds: float
    tokens: int
    peak_memory: int


Event = (
    RunBegan | TrainingBegan | WindowPlanned | MicrobatchDone | PipelineRan | Stepped | Evaluated | Sampled
    | CheckpointBegins | CheckpointSaved | SavePointReached | MemoryRanOut | JobJoined | JobFailed | JobDone | Note | StopAsked
    | RunEnded
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stop:
    """Request by a subscriber to end the run, which --resume continues, or one job of it, with its adapter as it is.

    A job ends after the optimizer step that it is in, or the one that Stepped or Evaluated tells of: it is evaluated and saved
    as after its last step, and it stays ended when the run is resumed. The numbers of the other jobs do not change. A run ends
    after the present microbatch, as after SIGTERM.

    Raises:
        TypeError: the job is not named by a text, or the reason is none.
    """

    job: str | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        given: tuple[Any, Any] = "" if self.job is None else self.job, self.reason
        if odd := [type(value).__name__ for value in given if not isinstance(value, str)]:
            raise TypeError(
                f"Stop takes the name of one job, or None for the run, and a reason, both texts; got {odd[0]}"
            )


class Subscriber(Protocol):
    """Subscriber: it receives every event of a run, one after the other and in the same order as all others.

    It runs in the training loop, so it must be quick; an event that comes while another is told waits. What it raises costs
    the run nothing: the run says so once, and tells it nothing more. KeyboardInterrupt and SystemExit end the run. What it
    returns other than a Stop means nothing.
    """

    def __call__(self, event: Event, /) -> Stop | None: ...


def __getattr__(name: str) -> Any:
    if name != "ThroughputCallback":
        raise AttributeError(f"module 'packlora.events' has no attribute {name!r}; it has {', '.join(__all__)}")
    return importlib.import_module("packlora.callbacks").ThroughputCallback
