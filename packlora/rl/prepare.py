"""A job that learns from rewards, checked before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packlora.adapters.spec import AdapterSpec
from packlora.config import JobConfig, Run
from packlora.data.dataset import configured_steps
from packlora.data.encode import Encoded
from packlora.data.tokens import check_vocabulary
from packlora.errors import InputError
from packlora.rl.data import FOLDER, RolloutData, RolloutSamples, guess_of
from packlora.rl.environments import Environments
from packlora.rl.prompts import read_both
from packlora.rl.rewards import ENVIRONMENTS, Rewards
from packlora.rl.teacher import check_teacher
from packlora.rl.tools import check_calls_are_read
from packlora.terminal import Told


def undivided(run: Run) -> Run:
    """A run that generates, with each job whole on one device.

    Raises:
        InputError: the run file divides jobs or the base model.
    """
    parallel = run.parallel
    divides = "devices_per_job" if parallel.devices_per_job not in ("auto", 1) else parallel.own[0] or parallel.divided
    if divides:
        name = next(job.name for job in run.jobs if job.rollout is not None)
        raise InputError(
            f"job {name!r}: rollout takes each job whole on one device, and parallel.{divides} divides jobs or the base "
            "model; leave it out"
        )
    return run.model_copy(update={"parallel": parallel.model_copy(update={"devices_per_job": 1})})


def rollout_data(
    run: Run, job: JobConfig, spec: AdapterSpec, tokenizer: Any, vocabulary: int, budget: int, longest: int,
    max_steps: int | None, told: Told,
) -> tuple[RolloutData, Encoded, Encoded, int, list[str]]:  # fmt: skip
    """Data of a job, a few samples as they may be, such ones of held-out prompts, the most tokens of one, and notes.

    Args:
        budget: most tokens of a microbatch.
        longest: most tokens that the model takes.

    Raises:
        InputError: a prompt, a reward or a number of tokens cannot be used.
    """
    new = job.rollout.max_new_tokens
    if job.rollout.log_completions and not run.trackers:
        raise InputError(
            f"job {job.name!r}: rollout.log_completions is for trackers, and this run has none; set trackers, or leave it "
            f"out: all completions are in {FOLDER}/ of the job's folder"
        )
    if spec.peft.lora_dropout:
        raise InputError(
            f"job {job.name!r}: its adapter has lora_dropout {spec.peft.lora_dropout:g}, so that what is trained would not be "
            "what has been drawn; set adapter.lora_dropout: 0"
        )
    most = min(job.data.max_length, budget, longest)
    if new >= most:
        raise InputError(
            f"job {job.name!r}: rollout.max_new_tokens is {new}, and a sample has at most {most} tokens with its prompt "
            "(data.max_length, a microbatch, or the model's context); lower the one or raise the other"
        )
    rewards, environments = Rewards(job.rollout, job.name), Environments(job.rollout, job.name)
    if job.rollout.has_environment:
        check_environments(job, tokenizer, environments)
    if job.rollout.teacher is not None:
        check_teacher(job.rollout.teacher, tokenizer, job.name)
    seed = run.seed_of(job)
    prompts, held_out, notes = read_both(job, tokenizer, most - new, told, seed)
    every = [*prompts, *held_out]
    fields = [*{frozenset(prompt.columns): prompt.columns for prompt in every}.values()]
    more: dict[str, Any] = {ENVIRONMENTS: []} if job.rollout.environment_factory is not None else {}
    for why in (environments.why_not(fields), rewards.why_not([{**row, **more} for row in fields])):
        if why is not None:
            raise InputError(f"job {job.name!r}: {why}")
    check_vocabulary(job.name, (prompt.ids for prompt in every), vocabulary, tokenizer)
    steps = configured_steps(job.train, len(prompts) * job.rollout.num_generations)
    samples = RolloutSamples(job, prompts, Path(run.output_dir) / job.name / FOLDER, seed, steps, most - new, held_out)
    data = RolloutData(job.name, samples, job.train, seed, max_steps)
    few = Encoded([sample for sample, _ in zip(samples, range(64), strict=False)])
    judged = Encoded([guess_of(prompt, new) for prompt in held_out])
    return data, few, judged, max(len(prompt.ids) for prompt in every) + new, notes


def check_environments(job: JobConfig, tokenizer: Any, environments: Environments) -> None:
    """Raises InputError where a job's environments give nothing to learn, or its tools cannot be called."""
    rollout = job.rollout
    if rollout.reward is None and rollout.teacher is None and not environments.has_reward:
        raise InputError(
            f"job {job.name!r}: there is no reward: the environment has neither `step` nor `get_reward`; set rollout.reward"
        )
    if environments.schemas:
        try:
            check_calls_are_read(tokenizer, job.data.chat_template_kwargs)
        except InputError as error:
            raise InputError(f"job {job.name!r}: rollout.tools: {error}") from None
