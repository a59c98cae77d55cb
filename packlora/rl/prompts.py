"""Prompts of a job that learns from rewards: rows of its data, rendered as training renders them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packlora.config import DataSource, JobConfig
from packlora.data.flags import VARIABLES
from packlora.data.messages import WEIGHT, check_messages
from packlora.data.places import prompt_text
from packlora.data.prompts import prompt_ids
from packlora.data.readers import files_of, values_of
from packlora.data.rows import How, with_system
from packlora.data.template import Template
from packlora.data.tokens import prompt_tokens
from packlora.data.values import Bad, check_text, holds_something
from packlora.errors import InputError, counted, kind_of, plural, shown
from packlora.seeding import stable_hash
from packlora.terminal import Told

FORMATS = "a row has a prompt, a text or a list of messages, or messages up to the one that is to be answered"
_NO_IMAGES = "leave images out, which a rollout does not take in this version"
UNSEEN = {
    "system": "make it the first message, or set data.system", "tools": "set rollout.tools", "functions": "set rollout.tools",
    "images": _NO_IMAGES, "image": _NO_IMAGES, VARIABLES: f"set data.{VARIABLES}",
}  # fmt: skip
"""Fields that the model is shown in rows of completions, with what to do here."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. where: file and line. ids [T] int32: its tokens. said: text or messages, as rewards are given them. columns:
    other fields of the row."""

    where: str
    ids: np.ndarray
    said: str | list[dict[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt for a person: a text as it is, of messages roles and contents."""
        if isinstance(self.said, str):
            return self.said
        return "\n".join(f"{one['role']}: {one.get('content') or ''}" for one in self.said)


def read_both(
    job: JobConfig, tokenizer: Any, longest: int, told: Told, seed: int
) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Prompts that a job is trained on, those that are held out, and what should be known of them.

    Args:
        seed: draws the share of the prompts that `data.eval_split` holds out.

    Raises:
        InputError: as read_prompts; or one of both would be without a prompt.
    """
    prompts, notes = read_prompts(job, tokenizer, longest, told)
    if job.data.eval_path is not None:
        held_out, more = read_prompts(job, tokenizer, longest, told, sources=job.data.eval_sources)
        return prompts, held_out, notes + more
    if job.data.eval_split is None:
        return prompts, [], notes
    count = int(job.data.eval_split * len(prompts) + 0.5)
    if not 0 < count < len(prompts):
        left = "none is held out" if count == 0 else "none is left to train on"
        share = f"data.eval_split {job.data.eval_split:g}"
        raise InputError(
            f"job {job.name!r}: of {plural(len(prompts), 'prompt')} {share} is {count}, so {left}; change it"
        )
    generator = np.random.Generator(np.random.Philox(stable_hash("eval_split", seed)))
    numbers = set(generator.permutation(len(prompts))[:count].tolist())
    kept = [prompt for number, prompt in enumerate(prompts) if number not in numbers]
    split_off = [prompt for number, prompt in enumerate(prompts) if number in numbers]
    notes.append(f"job {job.name!r}: eval_split holds out {count} of {len(prompts)} prompts")
    return kept, split_off, notes


def read_prompts(
    job: JobConfig, tokenizer: Any, longest: int, told: Told, most: int | None = None,
    sources: Sequence[DataSource] | None = None,
) -> tuple[list[Prompt], list[str]]:  # fmt: skip
    """Prompts of a job in the order of its data, and what should be known of them.

    Args:
        longest: most tokens of a prompt.
        most: rows that are read; None: all.
        sources: of the rows; None: those that are trained on.

    Raises:
        InputError: a file is missing or malformed, a row is no prompt or too long, or there are none.
    """
    out, skipped, dropped = list[Prompt](), list[str](), 0
    for prompt in itertools.islice(_prompts(job, tokenizer, sources or job.data.train_sources), most):
        if isinstance(prompt, InputError):
            if job.data.on_bad_row == "error":
                raise prompt
            skipped.append(str(prompt).removeprefix(f"job {job.name!r}: "))
            continue
        if len(prompt.ids) > longest:
            if job.data.truncate == "error":
                raise InputError(
                    f"job {job.name!r}: {prompt.where}: the prompt has {len(prompt.ids)} tokens, and {longest} leave room for "
                    "rollout.max_new_tokens; shorten it, raise data.max_length, or set data.truncate: drop"
                )
            dropped += 1
            continue
        out.append(prompt)
        told(f"job {job.name}: reading prompts", len(out))
    if not out:
        raise InputError(f"job {job.name!r}: its data has no prompts; {FORMATS}")
    notes = [counted(dropped, "prompt", "were dropped as too long")] if dropped else []
    left = counted(len(skipped), "row", "were left out by on_bad_row")
    notes += [f"{left}, the first: {skipped[0]}"] if skipped else []
    return out, [f"job {job.name!r}: {note}" for note in notes]


def _prompts(job: JobConfig, tokenizer: Any, sources: Sequence[DataSource]) -> Iterator[Prompt | InputError]:
    """Prompts of rows, one at a time; an InputError stands for a row that is none, which max_samples does not count."""
    tools = tools_of(job)
    for source in sources:
        how = How(source.columns, fields=True, subset=source.subset, split=source.split)
        left = source.max_samples
        for name in files_of(source.path, job.name):
            for where, value in values_of(name, job.name, how):
                if left == 0:
                    break
                found: Prompt | InputError
                try:
                    if isinstance(value, InputError):
                        raise value
                    if source.columns:
                        from packlora.data.foreign import renamed

                        value = renamed(value, source.columns, f"job {job.name!r}: {where}")
                    found = _prompt(value, where, job, tokenizer, tools)
                except InputError as error:
                    found = error
                yield found
                left = left - 1 if left is not None and isinstance(found, Prompt) else left


def _prompt(value: Any, where: str, job: JobConfig, tokenizer: Any, tools: list[Any] | None) -> Prompt:
    def bad(problem: str) -> InputError:
        return InputError(f"job {job.name!r}: {where}: {problem}; {FORMATS}")

    if not isinstance(value, Mapping):
        raise bad(f"a row must be a mapping, found {kind_of(value)}")
    if unseen := next((key for key in UNSEEN if holds_something(value.get(key))), None):
        raise bad(
            f"the row has {unseen!r}, which a rollout does not show to the model; {UNSEEN[unseen]}, or rename it if it is for "
            "rewards alone"
        )
    key = "prompt" if value.get("prompt") is not None else "messages"
    said = value.get(key)
    asked: str | list[dict[str, Any]]
    if isinstance(said, str) and said and key == "prompt":
        for name in ("system", VARIABLES):
            if getattr(job.data, name):
                raise bad(f"its prompt is a text, which is gone on from as it is, and data.{name} goes with messages")
        check_text(said, "'prompt'", bad)
        asked = said
    elif isinstance(said, list) and said and all(isinstance(one, Mapping) and "role" in one for one in said):
        if said[-1]["role"] == "assistant":
            raise bad(f"the last of its {key} is the assistant's, which has been answered already")
        asked = with_system(_messages([dict(one) for one in said], bad), job.data.system)
    elif said is None:
        raise bad(f"found {', '.join(shown(str(name), 40) for name in value) or 'an empty mapping'}")
    else:
        raise bad(f"its {key} is empty or no text and no messages")
    try:
        ids = tokens_of(asked, tokenizer, job.data.chat_template_kwargs, tools)
    except InputError as error:
        raise InputError(f"job {job.name!r}: {where}: {error}") from None
    columns = {str(name): own for name, own in value.items() if name not in (key, "prompts", "completions")}
    return Prompt(where, np.asarray(ids, np.int32), asked, columns)


def _messages(said: list[dict[str, Any]], bad: Bad) -> list[dict[str, Any]]:
    """Messages of a prompt, checked as those of rows of completions are, and without what says that they are learnt."""
    blocks = [block for one in said if isinstance(one.get("content"), list) for block in one["content"]]
    if any(not isinstance(block, Mapping) or block.get("type") != "text" for block in blocks):
        raise bad(f"a message has a block that is no text; {_NO_IMAGES}")
    if blocks:
        from packlora.modality import plugin

        said = plugin().with_images({"messages": said}, None, bad)[0]["messages"]
    return [{key: own for key, own in one.items() if key != WEIGHT} for one in check_messages(said, bad)]


def tools_of(job: JobConfig) -> list[Any] | None:
    """JSON schemas of the tools of a job, which its prompts show; None where it has none."""
    if job.rollout is None or not job.rollout.has_environment:
        return None
    from packlora.rl.environments import Environments

    return Environments(job.rollout, job.name).schemas


def tokens_of(
    said: str | list[dict[str, Any]], tokenizer: Any, variables: Mapping[str, Any], tools: list[Any] | None
) -> list[int]:
    """Tokens of a prompt.

    Args:
        said: plain text, or messages, by the tokenizer's chat template.
        variables: of the chat template.
        tools: JSON schemas of what the model may call.

    Raises:
        InputError: the template refuses the messages, or does not show all of them and the tools; or there are no tokens.
    """
    if not tools:
        return prompt_ids(said, tokenizer, variables=variables)
    if isinstance(said, str):
        raise InputError("its prompt is a text, and tools go by a chat template; make it a list of messages")
    return prompt_tokens(prompt_text(Template(tokenizer, tools, variables), said), tokenizer, is_rendered=True)


def fingerprint(prompts: list[Prompt]) -> str:
    """Hash of tokens and columns; it tells whether the data has changed."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(prompt.ids.tobytes())
        digest.update(json.dumps(dict(prompt.columns), sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def further_prompts(own: Sequence[int], count: int, known: int, seed: int, step: int) -> list[int]:
    """Numbers of the prompts that come after those of a step: all others before any comes again.

    Args:
        own: of the step. count: that are wanted. known: prompts that there are.
    """
    found, taken = list[int](), set(own)
    for turn in itertools.count():
        if len(found) >= count:
            break
        generator = np.random.Generator(np.random.Philox(stable_hash("refill", seed, step, turn)))
        found += [number for number in generator.permutation(known).tolist() if turn or number not in taken]
    return found[:count]
