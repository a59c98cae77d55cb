"""generate and merge: what a finished adapter answers, and its weights folded into the base model's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from packlora.data.messages import check_messages
from packlora.errors import InputError, quoted
from packlora.result import JobResult
from packlora.run_file_errors import unknown_key
from packlora.terminal import say

Adapter = str | os.PathLike[str] | JobResult
"""Folder of an adapter, or the result of its job."""


def generate(
    adapter: Adapter, prompts: Sequence[str | list[dict[str, Any]]], *, system: str | None = None, raw: bool = False,
    base_model: str | None = None, dtype: str = "auto", device: str = "auto", **sampling: Any,
) -> list[str]:  # fmt: skip
    """Generate the answer of an adapter to each prompt; the base model is loaded once.

    Args:
        adapter: folder of a finished adapter or a checkpoint, or a JobResult.
        prompts: texts, or conversations as lists of messages; rendered as in training.
        system: a message of the system before each text.
        raw: texts are continued as they are, without the chat template.
        base_model: folder or hub id of the base; by default what the adapter names.
        dtype: of the base; auto is that of the run that trained the adapter.
        device: auto, cpu, cuda or cuda:1.
        sampling: max_new_tokens (256), temperature (0: the likeliest token each time) and seed (0), on
            which an answer depends alone, whatever is asked beside it.

    Returns:
        The answers, in the order of the prompts.

    Raises:
        InputError: the adapter, its base or a prompt cannot be used, or a key of sampling is unknown.
    """
    from packlora.answers.talk import Sampling, load_speakers

    known = list(inspect.signature(Sampling).parameters)
    for key, value in sampling.items():
        if key not in known:
            raise InputError(f"generate: {key}: {unknown_key(key, known)}")
        if isinstance(value, bool) or not isinstance(value, Real if key == "temperature" else Integral):
            raise InputError(
                f"generate: {key}: found {quoted(value)}, not a {'' if key == 'temperature' else 'whole '}number"
            )
    asked = [prompts] if isinstance(prompts, str) else list(prompts)
    for number, said in enumerate(asked):
        _check_said(said, f"generate: prompts[{number}]")
    speakers = load_speakers([_folder(adapter)], base_model, dtype, device)
    return speakers.answers(speakers.asked(asked, system, raw, Sampling(**sampling)))


def _check_said(said: Any, where: str) -> None:
    """Raises InputError where a prompt is neither a text nor a conversation."""
    if isinstance(said, str):
        return
    if not isinstance(said, list):
        raise InputError(
            f"{where}: found {quoted(said, 80)}; a prompt is a text, or a conversation as a list of messages, which stands in "
            "the list of prompts"
        )
    check_messages(said, lambda problem: InputError(f"{where}: {problem}"))


def merge(adapter: Adapter, out: str | Path, **settings: Any) -> Path:
    """Fold an adapter into its base model's weights, and write the model and its tokenizer.

    Args:
        adapter: folder of a PEFT LoRA or DoRA adapter, or a JobResult.
        out: folder to write; it must not exist, or be empty.
        settings: base_model, dtype, quantization, double_quant, requantize and check, as the options of `packlora merge`.

    Returns:
        The folder; what should be known of the model is said on standard error.

    Raises:
        InputError: the adapter, the base, the folder or a setting cannot be used.
        WriteError: the disk is full or broken.
    """
    from packlora.export.merge import merge_adapter

    known = [key for key in inspect.signature(merge_adapter).parameters if key not in ("adapter_dir", "out")]
    for key in settings:
        if key not in known:
            raise InputError(f"merge: {key}: {unknown_key(key, known)}")
    if note := merge_adapter(_folder(adapter), Path(out), **settings):
        say(note)
    return Path(out)


def _folder(adapter: Adapter) -> Path:
    return adapter.path if isinstance(adapter, JobResult) else Path(adapter)
