"""A tokenizer that other trainers save beside an adapter, where it says something else than the base model's.

TRL, Axolotl and LLaMA-Factory save one with every adapter, mostly a copy of the base's. Where the chat template differs, the
adapter has learnt answers behind other prompts than the base's template writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from packlora.base.load import TOKENIZER_FILES

TEMPLATE = "chat_template.jinja"
MOST_BYTES = 2**20
"""Bytes of the largest chat template that is read."""


@dataclass(frozen=True, slots=True)
class OwnTokenizer:
    """Tokenizer of an adapter's folder, and its differences from the base's in words."""

    tokenizer: Any
    what: str


def own_tokenizer(folder: str | Path, base: Any) -> OwnTokenizer | None:
    """The tokenizer in an adapter's folder; None where there is none that can be read, or it is that of the base.

    Args:
        base: the base model's tokenizer.
    """
    try:
        if not any(file.name.startswith(TOKENIZER_FILES) for file in Path(folder).iterdir()):
            return None
        own = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception:  # files that are no tokenizer raise many types; the adapter is usable without it
        return None
    said = {
        "another chat template": own.chat_template is not None and own.chat_template != base.chat_template,
        "other tokens": own.get_vocab() != base.get_vocab(),
    }
    what = " and ".join(one for one, differs in said.items() if differs)
    return OwnTokenizer(own, what) if what else None


def own_template(folder: str | Path) -> str | None:
    """The chat template beside an adapter that was trained with `data.chat_template`; None where there is none, or a whole
    tokenizer, see own_tokenizer."""
    file = Path(folder) / TEMPLATE
    try:
        if any(one.name.startswith(TOKENIZER_FILES) for one in file.parent.iterdir()):
            return None
        return file.read_text(encoding="utf-8") if file.is_file() and file.stat().st_size <= MOST_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


def unused_notes(folders: Iterable[str], base: Any) -> list[str]:
    """Notes about the tokenizers of several folders, each note once."""
    return [note for folder in dict.fromkeys(folders) if (note := unused_note(folder, base))]


def unused_note(folder: str | Path, base: Any) -> str | None:
    """Note that an adapter's folder has a tokenizer of its own where the base model's makes the texts; None where it has
    none."""
    found = own_tokenizer(folder, base)
    if found is None:
        return None
    return (
        f"{folder} has a tokenizer of its own, with {found.what} than the base model's, by which texts are made here; "
        "`packlora merge` writes the adapter's own into the merged model"
    )
