"""Texts that jobs' adapters write for their sample_prompts, greedily, at evaluations.

A job's prompts are packed as its samples are, and run through the model once for each new token, without dropout and without a
cache of keys: nothing of the model is changed for it and nothing random is drawn, so training has the bits that it has without.
The prompts of each job run by themselves: a text depends on the job's adapter alone.

Where several processes hold the base model together, all that train a job generate its texts, in step, and go on from each
token with the same ones; the first of them tells the texts. Stages of a pipeline do so where a step is told, which all of them
come to, and what else is on its way waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch

from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.data.prompts import Prompt, answer_ends
from packlora.data.template import templated
from packlora.engine.memory import free_memory
from packlora.engine.passes import Passes, one_error_for_memory
from packlora.events import Evaluated, Event, JobJoined, Note, RunBegan, Sampled, Stepped
from packlora.parallel.alone import ALONE, Alone
from packlora.runtime.evaluate import is_multiple
from packlora.runtime.events import Emitter
from packlora.runtime.job import Job

MOST_TOKENS = 4096
"""Most tokens of prompts with their answers that run together, where there are several."""


class Sampler:
    """A subscriber that generates texts of jobs before their first step, at evaluations and after the last step, once each.

    Args:
        passes: of the model with the adapters of the jobs on it.
        jobs: those that train, by name; some may join.
        every: optimizer steps between evaluations, of jobs that do not say so themselves.
        events: are told of the texts. Where the run is to end no more are made; --resume makes them.
        known: jobs and steps of which there are texts; the same on all processes of group.
        group: the processes that generate in step.
    """

    def __init__(
        self, passes: Passes, jobs: Mapping[str, Job], every: int, events: Emitter,
        known: Collection[tuple[str, int]], group: Alone = ALONE,
    ) -> None:  # fmt: skip
        self.passes, self.base, self.jobs, self.every, self.events = passes, passes.base, jobs, every, events
        self.known, self.group = set(known), group
        self.in_step = group is not ALONE
        """Whether other processes wait for this one, so that the run ends where it fails."""
        self._ends: dict[str | None, list[int]] = {}
        """Tokens that end an answer, by chat template."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            for job in self.jobs.values():
                self._sample(job, is_judged=False)
        elif isinstance(event, JobJoined | Stepped | Evaluated) and event.job in self.jobs:
            self._sample(self.jobs[event.job], isinstance(event, Evaluated))

    def _sample(self, job: Job, is_judged: bool) -> None:
        """Tell the texts of a job, if they are due, or that there are none, and why."""
        if not job.prompts or job.status != "running" or (job.name, job.step) in self.known:
            return
        own = job.config.train.eval_steps
        every = self.every if own is None else own
        if (
            not (is_judged or job.step in (0, job.data.num_steps) or is_multiple(job.step, every))
            or self._agreed([]) is None
        ):
            return
        try:
            with one_error_for_memory():
                texts = self._texts(job)
        except torch.OutOfMemoryError as error:
            if self.in_step:
                raise MemoryError(
                    f"out of memory on {self.base.device} in the samples of job {job.name!r}, which several devices compute "
                    "together; lower sample_max_new_tokens"
                ) from error
            texts = []
            self.events.emit(
                Note(f"job {job.name!r}: no samples after step {job.step}: out of memory; training goes on")
            )
            free_memory(self.base.device)
        if texts is None:
            return
        self.known.add((job.name, job.step))
        if texts:
            pairs = [{"prompt": prompt.text, "text": text} for prompt, text in zip(job.prompts, texts, strict=True)]
            self.events.emit(Sampled(job.name, job.step, tuple(pairs)))

    def _texts(self, job: Job) -> list[str] | None:
        """Answers to a job's prompts; None where the run is to end before."""
        out: list[str] = []
        while len(out) < len(job.prompts):
            part, total = [job.prompts[len(out)]], job.prompts[len(out)].most
            for prompt in job.prompts[len(out) + 1 :]:
                if (total := total + prompt.most) > MOST_TOKENS:
                    break
                part.append(prompt)
            answers = self._answers(job, part)
            if answers is None:
                return None
            out += [str(self.base.tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
        return out

    def _answers(self, job: Job, prompts: Sequence[Prompt]) -> list[list[int]] | None:
        """New tokens of each prompt, without the one that ends it."""
        if job.chat_template not in self._ends:
            tokenizer = templated(self.base.tokenizer, job.chat_template)
            self._ends[job.chat_template] = answer_ends(tokenizer, self.base.model)
        ends, owner = self._ends[job.chat_template], job.adapter.number
        rows = [prompt.ids.tolist() for prompt in prompts]
        going = list(range(len(rows)))
        while going:
            tokens = self._agreed(self._next([rows[number] for number in going], owner))
            if tokens is None:
                return None
            for number, token in zip(going, tokens, strict=True):
                rows[number].append(token)
            going = [n for n in going if rows[n][-1] not in ends and len(rows[n]) < prompts[n].most]
        answers = [row[len(prompt.ids) :] for row, prompt in zip(rows, prompts, strict=True)]
        return [answer[:-1] if answer[-1] in ends else answer for answer in answers]

    def _agreed(self, tokens: Sequence[int]) -> list[int] | None:
        """The tokens, the same on all processes also where these round differently; None where the run is to end."""
        asked, *same = self.group.most([int(self.events.stop.asked), *tokens])
        return None if asked else same

    @torch.no_grad()
    def _next(self, rows: Sequence[list[int]], owner: int) -> list[int]:
        """The likeliest next token of each row of tokens; zeros where another stage of a pipeline has it."""
        lengths = [len(row) for row in rows]
        total = sum(lengths)
        if filler := max(0, MIN_ROWS - total):
            rows = [*rows, (rows[0] * filler)[:filler]]
        sizes = [len(row) for row in rows]
        device = self.base.device
        ids_T = torch.tensor([token for row in rows for token in row], device=device)
        positions_T = torch.cat([torch.arange(size) for size in sizes]).to(device)
        last = [stop - 1 for stop in accumulate(lengths)]
        last_L = torch.tensor(last + [0] * (MIN_ROWS - len(last)), device=device)
        owners = TokenOwners(len(ids_T), ((owner, 0, total),), label_rows=(((owner, 0, len(last)),), last_L))
        logits_LV = self.passes.logits(owners, ids_T, positions_T, sizes, last_L)
        found: list[int] = [0] * len(lengths) if logits_LV is None else logits_LV[: len(lengths)].argmax(-1).tolist()
        return found
