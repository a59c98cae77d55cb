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
    file = path / FILE if path.is_dir() else path
    if file.is_file() or not path.is_dir():
        text = _text(file, bad, MOST_BYTES)
        if "{" not in text:
            raise bad(f"{file} has no Jinja in it, so it would write the same for every conversation")
        return text
    if not (path / SETTINGS).is_file():
        raise bad(f"the folder has neither {FILE} nor {SETTINGS}; give that of a tokenizer with a chat template")
    try:
        found = json.loads(_text(path / SETTINGS, bad, 64 * MOST_BYTES)).get("chat_template")
    except (ValueError, AttributeError, RecursionError) as error:
        raise bad(f"{SETTINGS} is not what a tokenizer saves: {shown(error)}") from None
    if isinstance(found, list):
        raise bad(f"{SETTINGS} holds several chat templates; write the one that is meant into a file")
    if not isinstance(found, str) or not found.strip():
        raise bad(f"{SETTINGS} holds no chat template; give the folder of a tokenizer with one")
    return found


def _text(file: Path, bad: Any, most: int) -> str:
    try:
        if not file.is_file():
            raise bad(f"{file} is no plain file")
        with file.open("rb") as opened:
            raw = opened.read(most + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise bad(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > most:
        raise bad(f"{file} has more than {most} bytes; this is no chat template")
    return text
