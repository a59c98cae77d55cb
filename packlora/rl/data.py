"""Samples of a job that learns from rewards: completions of its prompts, made step by step while it trains.

The completions of a global batch are written to a file before they are learnt from, so that a run which is resumed learns from
the same ones. Before training, and for what is planned then, samples of guessed lengths stand for them.

Sample n of step k has the number k * global_batch_size + n; those of a prompt lie together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packlora.config import JobConfig
from packlora.data.dataset import JobData
from packlora.data.encode import NO_COLUMNS, Sample
from packlora.data.order import SampleOrder
from packlora.files import write_file
from packlora.rl.correction import corrections
from packlora.rl.prompts import Prompt, fingerprint, further_prompts
from packlora.rl.refilled import Refilled

FOLDER = "rollouts"
"""Folder of a job's folder that the files stand in."""


def file_of(job: Path, step: int) -> Path:
    """File of the completions that a step learns from, in the folder of a job. step: counted from 1."""
    return job / FOLDER / f"step-{step}.json"


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of a prompt.

    prompt: its number. ids [l], text: new tokens. logprobs [l]: of each when it was drawn, by the model that is trained.
    reference, teacher [l]: by the base model and by the teacher, where these are asked for. advantage, reward: of the whole.
    drift: mean difference of the log-probabilities of drawing and training. rewards: by their names; None: nothing to say.
    is_cut: whether it ended by its length. is_lost: whether it has no reward, as those of its group failed or
    had nothing to say of it.

    With an environment `ids` and `text` have what it says as well. mask [len(ids)]: 1 for a token of the model, to which arrays
    [l] belong, and 0 for one of the environment. start: tokens of the prompt, where its row has others. turns: of the model.
    calls, failures: of tools.

    sampled [l]: log-probabilities by the sampler. entropy: mean of the distributions that tokens were drawn from. None: of a
    file that does not have them.
    """

    prompt: int
    ids: list[int]
    logprobs: list[float]
    advantage: float
    reward: float
    drift: float
    rewards: dict[str, float | None]
    reference: list[float] | None = None
    teacher: list[float] | None = None
    text: str = ""
    is_cut: bool = False
    is_lost: bool = False
    start: list[int] | None = None
    mask: list[int] | None = None
    turns: int = 1
    calls: int = 0
    failures: int = 0
    sampled: list[float] | None = None
    entropy: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions of a step. version: steps that the adapter had taken when it drew them. reward_hash: of the functions.
    draw_seconds: that drawing took, with the completions of other jobs; 0 for those of a file, NaN for an evaluation's."""

    step: int
    version: int
    reward_hash: str
    completions: tuple[Completion, ...]
    draw_seconds: float = 0.0
    refilled: Refilled | None = None

    @property
    def gain(self) -> float:
        """Mean over all tokens of how much likelier they are for the teacher."""
        sums = [
            (np.subtract(one.teacher, one.logprobs).sum(), len(one.logprobs)) for one in self.completions if one.teacher
        ]
        return float(sum(total for total, _ in sums) / max(1, sum(count for _, count in sums)))


class RolloutSamples(Sequence[Sample]):
    """Samples by number. Its length and iteration are those of an epoch, with guessed lengths.

    Args:
        folder: of the files.
        seed: of the order of prompts.
        steps: that the job is to take.
        longest: most tokens of a prompt.
        held_out: prompts that are held out.
    """

    def __init__(
        self, job: JobConfig, prompts: list[Prompt], folder: Path, seed: int, steps: int, longest: int = 2**31,
        held_out: Sequence[Prompt] = (),
    ) -> None:  # fmt: skip
        assert job.rollout is not None
        self.longest, self.held_out = longest, list(held_out)
        self.evaluated: tuple[int, list[Sample]] | None = None
        """Step, and samples of the held-out prompts by the adapter that had taken so many steps."""
        self.name, self.prompts, self.folder, self.config = job.name, prompts, folder, job.rollout
        self.size, self.group = job.train.global_batch_size, job.rollout.num_generations
        self.make: Callable[[int], None] | None = None
        """Makes the batch of a step; set while the job trains."""
        self.begun_at: int | None = None
        """Step at which this session has begun; files of later versions are of a run that went on differently."""
        self.order = SampleOrder(
            job.name, np.zeros(len(prompts), np.int32), self.size // self.group, seed, steps, job.train.shuffle
        )
        self._held: dict[int, tuple[Batch, list[Sample]]] = {}

    def __len__(self) -> int:
        return int(len(self.prompts) * self.group)

    def __iter__(self) -> Iterator[Sample]:
        return (self._guess(number) for number in range(len(self)))

    def __getitem__(self, number: int) -> Sample:  # type: ignore[override]
        if self.make is None:
            return self._guess(number % len(self))
        step, at = divmod(number, self.size)
        return self.samples(step)[at]

    def prompts_of(self, step: int, more: int = 0) -> list[int]:
        """Numbers of the prompts of a step, and of so many that come after them where groups are refilled."""
        numbers: list[int] = self.order.samples(step).tolist()
        return numbers + further_prompts(numbers, more, len(self.prompts), self.order.seed, step)

    def prompts_from(self, is_held_out: bool) -> list[Prompt]:
        """Prompts that are trained on, or held out."""
        return self.held_out if is_held_out else self.prompts

    def has(self, step: int) -> bool:
        """Whether a step's completions are known, here or in a file that is of this run."""
        if step not in self._held and (found := self._read(step)) is not None:
            self._hold(found)
        return step in self._held

    def samples(self, step: int) -> list[Sample]:
        """Samples of a step, which are made if they are not known. Of a job that takes no more steps one stands for all, as
        what is computed of it is dropped."""
        if not self.has(step) and self.make is not None:
            self.make(step)
        return self._held[step][1] if step in self._held else [self._guess(0)]

    def put(self, batch: Batch) -> None:
        """Take the completions of a step, and write them. Raises OSError."""
        self._write(batch, self._file(batch.step), self.prompts)
        self._hold(batch)

    def put_held_out(self, batch: Batch) -> None:
        """Take the completions of the held-out prompts, and write them. Raises OSError."""
        self._write(batch, self.folder / f"held-out-{batch.step}.json", self.held_out)
        gain = batch.gain
        samples = [self.sample(one, batch, gain, self.held_out[one.prompt]) for one in batch.completions]
        self.evaluated = batch.step, samples

    def _write(self, batch: Batch, file: Path, prompts: Sequence[Prompt]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tree = {
            "step": batch.step, "version": batch.version, "reward_hash": batch.reward_hash,
            "prompts": {one.prompt: prompts[one.prompt].text for one in batch.completions},
            "completions": [_tree(one) for one in batch.completions],
            "refilled": None if batch.refilled is None else asdict(batch.refilled),
        }  # fmt: skip
        write_file(file, lambda path: path.write_text(json.dumps(tree), encoding="utf-8"))

    def sample(self, one: Completion, batch: Batch, gain: float, prompt: Prompt) -> Sample:
        """A completion as a sample, with the columns of engine/objectives/policy.py and those of rl/objective.py."""
        columns = {
            "logprobs": np.array(one.logprobs), "advantages": self._advantages(one, gain), "reward": np.array(one.reward),
            "drift": np.array(one.drift), "cut": np.array(float(one.is_cut)), "lost": np.array(float(one.is_lost)),
            "staleness": np.array(float(batch.step - batch.version)), "seconds": np.array(batch.draw_seconds),
        }  # fmt: skip
        columns |= corrections(one.logprobs, one.sampled, self.config)
        columns |= {f"rewards/{name}": np.array(np.nan if own is None else own) for name, own in one.rewards.items()}
        if one.reference is not None:
            columns["reference"] = np.array(one.reference)
        if one.teacher is not None:
            columns["away"] = np.array(np.mean(np.subtract(one.logprobs, one.teacher)))
        if one.entropy is not None:
            columns["entropy"] = np.array(one.entropy)
        if one.mask is not None:
            counted = ("turns", one.turns), ("calls", one.calls), ("failures", one.failures)
            columns |= {name: np.array(float(count)) for name, count in counted}
        if batch.refilled is not None:
            columns |= batch.refilled.columns()
        start = prompt.ids.tolist() if one.start is None else one.start
        return sample_of(start, one.ids, one.mask, columns)

    def _advantages(self, one: Completion, gain: float) -> np.ndarray:
        """Advantages [] or [l]. With a teacher a token's own is greater by how much likelier it is for the teacher than the
        batch's tokens are on average, which gives the gradient of the divergence from the teacher."""
        if one.teacher is None:
            return np.array(one.advantage)
        own: np.ndarray = one.advantage + self.config.teacher_weight * (np.subtract(one.teacher, one.logprobs) - gain)
        return own

    # --- files -------------------------------------------------------------------------------------------------------------

    def _file(self, step: int) -> Path:
        return file_of(self.folder.parent, step + 1)

    def last_hash(self, step: int) -> str | None:
        """Hash of the rewards by which the step before was learnt; None where there is no file of it."""
        found = self._read(step - 1) if step > 0 else None
        return None if found is None else found.reward_hash

    def _read(self, step: int) -> Batch | None:
        """The batch of a step's file; None where there is none of this run."""
        if self.begun_at is None:
            return None
        try:
            tree = json.loads(self._file(step).read_text(encoding="utf-8"))
            found = Batch(
                tree["step"],
                tree["version"],
                tree["reward_hash"],
                tuple(Completion(**one) for one in tree["completions"]),
                refilled=None if tree.get("refilled") is None else Refilled(**tree["refilled"]),
            )
            prompts = [number for number in self._places(step, found.refilled) for _ in range(self.group)]
            for one in found.completions:
                _check(one)
        except (OSError, ValueError, LookupError, TypeError):
            return None
        expected = max(0, step - self.config.max_staleness)
        is_own = (found.step, found.version) == (step, expected) and found.version <= self.begun_at
        return found if is_own and [one.prompt for one in found.completions] == prompts else None

    def _places(self, step: int, refilled: Refilled | None) -> list[int]:
        """Numbers of the prompts whose groups stand in the places of a step. Raises LookupError where too many were drawn, and
        ValueError or TypeError where what is said of the groups is no number."""
        own = self.prompts_of(step)
        if refilled is None:
            return own
        refilled.columns()
        more = refilled.drawn - len(own)
        if more > self.config.rounds * len(own):
            raise LookupError("of another run")
        drawn = self.prompts_of(step, more)
        return [drawn[number] for number in refilled.numbers]

    def _hold(self, batch: Batch) -> None:
        gain = batch.gain
        samples = [self.sample(one, batch, gain, self.prompts[one.prompt]) for one in batch.completions]
        self._held[batch.step] = batch, samples
        for step in [own for own in self._held if own < batch.step - self.config.max_staleness - 2]:
            del self._held[step]

    def held(self, step: int) -> Batch:
        """The completions of a step that is known."""
        return self._held[step][0]

    def _guess(self, number: int) -> Sample:
        return guess_of(self.prompts[number // self.group], self.config.max_new_tokens)


def _check(one: Completion) -> None:
    """Raises ValueError or TypeError where the numbers of a completion are none, or not as many as its tokens."""
    count = len(one.ids) if one.mask is None else sum(one.mask)
    lists = [own for own in (one.logprobs, one.sampled, one.reference, one.teacher) if own is not None]
    if any(len(own) != count for own in lists):
        raise ValueError("other tokens")
    single = [one.advantage, one.reward, one.drift, 0.0 if one.entropy is None else one.entropy]
    if any(np.array(own).dtype.kind not in "fi" for own in (single, *lists)):
        raise TypeError("no numbers")


def guess_of(prompt: Prompt, most: int) -> Sample:
    """A sample that stands for a completion of a prompt, half as long as it may be."""
    new = max(1, most // 2)
    ids = np.concatenate([prompt.ids, np.full(new, prompt.ids[-1])]).astype(np.int32)
    return Sample(ids, np.arange(len(ids)) >= len(prompt.ids))


def sample_of(
    start: Sequence[int], ids: Sequence[int], mask: Sequence[int] | None, columns: Mapping[str, np.ndarray] = NO_COLUMNS
) -> Sample:
    """A completion after its prompt as a sample; learnt where the mask is 1, or all of it."""
    whole = np.asarray([*start, *ids], np.int32)
    is_label = np.asarray([0] * len(start) + list(mask or [1] * len(ids)), bool)
    return Sample(whole, is_label, columns=columns)


def _tree(one: Completion) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Completion.__slots__}


@dataclass(slots=True)
class RolloutOrder(SampleOrder):
    """The global batches of completions."""

    rollouts: RolloutSamples = field(kw_only=True, repr=False, compare=False)

    def samples(self, number: int) -> np.ndarray:
        rollouts = self.rollouts
        count = len(rollouts.prompts_of(number)) * rollouts.group
        return np.arange(number * rollouts.size, number * rollouts.size + count)

    def batch(self, n: int) -> list[tuple[int, int]]:
        rollouts = self.rollouts
        if rollouts.make is None:
            return [(number, rollouts[number].num_tokens) for number in self.samples(n).tolist()]
        first = n * rollouts.size
        return [(first + at, sample.num_tokens) for at, sample in enumerate(rollouts.samples(n))]


@dataclass(slots=True)
class RolloutData(JobData):
    """Completions in the place of a job's samples."""

    def __post_init__(self) -> None:
        JobData.__post_init__(self)
        known, rollouts = self.planned, self.rollouts
        self.planned = RolloutOrder(
            known.name, known.lengths, known.global_batch_size, known.seed, known.num_batches, known.shuffle,
            rollouts=rollouts,
        )  # fmt: skip

    @property
    def guessed(self) -> str:
        """Guesses that `packlora plan` makes of such a job, in words."""
        return "its completions are taken to be half of rollout.max_new_tokens long; drawing and judging them takes time beside"

    @property
    def rollouts(self) -> RolloutSamples:
        """The samples."""
        assert isinstance(self.samples, RolloutSamples)
        return self.samples

    def label_tokens(self, step: int) -> int:
        return sum(sample.num_labels for sample in self.rollouts.samples(step))

    def fingerprint(self, held_out: Sequence[Sample]) -> str:
        return fingerprint([*self.rollouts.prompts, *self.rollouts.held_out])

    def objective(self) -> Any:
        from packlora.rl.objective import RewardObjective

        return RewardObjective.of(self.config, self.rollouts.config)
