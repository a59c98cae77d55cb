"""Chat templates that a job has instead of the base model's (`data.chat_template`): known ones, files, tokenizers' folders.

How a template renders, and within which limits, is template.py's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from packlora.config.data import TEMPLATES
from packlora.data.template import templated
from packlora.data.tokens import leading
from packlora.errors import InputError, quoted, shown

MOST_BYTES = 2**20
"""Bytes of the largest file of a template; that of a tokenizer's settings, which name many tokens, may be 64 times as large."""
FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
"""Files of a tokenizer's folder that may hold its chat template; the first one goes before the second."""

_GO_ON = "{% if add_generation_prompt %}OPENED{% endif %}"
_CHECKED = "{% if message.role not in ROLES %}{{ raise_exception('it knows no role ' + message.role) }}{% endif %}"
_LOOP = "{% for message in messages %}" + _CHECKED


def _turns(turn: str, opened: str, roles: str = "('system', 'user', 'assistant')") -> str:
    """A template that writes all turns alike. opened: what an assistant's turn begins with."""
    return _LOOP.replace("ROLES", roles) + turn + "{% endfor %}" + _GO_ON.replace("OPENED", opened)


KNOWN = {
    "chatml": _turns(
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
        "('system', 'user', 'assistant', 'tool')",
    ),
    "llama3": _turns(
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": _turns(
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "('user', 'assistant')",
    ),
    "zephyr": _turns("<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n", "<|assistant|>\n"),
    "alpaca": _turns(
        "{% if message.role == 'system' %}{{ message.content }}\n\n"
        "{% elif message.role == 'user' %}### Instruction:\n{{ message.content }}\n\n"
        "{% else %}### Response:\n{{ message.content }}{{ eos_token }}\n\n{% endif %}",
        "### Response:\n",
    ),
    "vicuna": _turns(
        "{% if message.role == 'system' %}{{ message.content }} "
        "{% elif message.role == 'user' %}USER: {{ message.content }} "
        "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}",
        "ASSISTANT:",
    ),
}
"""Templates by the names of config/data.py, TEMPLATES; the token that a tokenizer puts before any text stands before each."""
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
"""Tokens that end a turn in templates that do not end it with the tokenizer's own end of a text."""


def with_template(tokenizer: Any, asked: str, job: str) -> Any:
    """A copy of a tokenizer with the chat template that `data.chat_template` means.

    Args:
        asked: name of a known template, a file that holds one, or the folder of a tokenizer.
        job: name for messages.

    Raises:
        InputError: there is none, or its answers could not be told to end with this tokenizer.
    """

    def bad(problem: str) -> InputError:
        return InputError(f"job {job!r}: data.chat_template {quoted(asked)}: {problem}")

    if asked not in TEMPLATES:
        return templated(tokenizer, _read(Path(asked), bad))
    if os.path.lexists(asked):
        raise bad(
            f"this is the name of a known template, and there is a file of that name; write ./{asked} for the file"
        )
    end = ENDS.get(asked, tokenizer.eos_token)
    if end is None or end not in tokenizer.get_vocab():
        others = ", ".join(name for name in TEMPLATES if name not in ENDS)
        raise bad(
            f"it ends an answer with {end or 'the end of a text'}, which is no token of the base model, so that nothing would "
            f"stop its answers; {others} end with the tokenizer's own eos_token"
        )
    begins = "{{ bos_token }}" * (leading(tokenizer) == [tokenizer.bos_token_id])
    return templated(tokenizer, begins + KNOWN[asked])


def _read(path: Path, bad: Any) -> str:
    """The template in a file, or in a tokenizer's folder."""
    if not path.exists():
        raise bad(f"there is no such file or folder; known names are {', '.join(TEMPLATES)}")
    names = (FILE, SETTINGS) if path.is_dir() else ("",)
    file = next((path / name for name in names if (path / name).is_file()), None)
    if file is None:
        raise bad(f"it is no plain file, and no folder with {FILE} or {SETTINGS}, as that of a tokenizer")
    is_settings = path.is_dir() and file.name == SETTINGS
    most = MOST_BYTES * (64 if is_settings else 1)
    try:
        if file.stat().st_size > most:
            raise bad(f"{file} has more than {most} bytes; this is no chat template")
        found = file.read_text(encoding="utf-8-sig")
        found = json.loads(found).get("chat_template") if is_settings else found
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise bad(f"cannot read {file}: {getattr(error, 'strerror', None) or shown(error)}") from None
    if not isinstance(found, str) or "{" not in found:
        several = "; write the one of several that is meant into a file" * isinstance(found, list)
        raise bad(f"{file} holds no chat template, which is a text with Jinja in it{several}")
    return found
