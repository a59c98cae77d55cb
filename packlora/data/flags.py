"""Fields of a row: those that say what kind of row it is, and what is beside its texts in the formats of other tools.

Each key that a tool gives a meaning is honoured or refused by its name. Other keys are the author's own notes, and ignored.
"""

from __future__ import annotations

from typing import Any

from packlora.config.data import OF_RENDERING
from packlora.data.values import Bad, check_parts, check_text, holds_something, unpacked
from packlora.errors import kind_of, quoted

KINDS: tuple[tuple[str, ...], ...] = (
    ("prompt", "completion"), ("messages",), ("text",), ("input_ids",), ("conversations",), ("instruction", "output"),
    ("chosen", "rejected"),
)  # fmt: skip
"""Fields of a row of each kind; a row with the fields of two kinds is refused."""
FIELDS = tuple(name for kind in KINDS for name in kind)
VARIABLES, LAST, SINGLE = "chat_template_kwargs", "mask_history", "parallel_tool_calls"
"""Keys of rows of prompts and messages that are honoured: the variables of the chat template (TRL), whether only the last
answer is learnt (LLaMA-Factory), whether a turn may have several calls (OpenAI)."""
SHOWN = ("system", "tools", "functions", "images", "image")
"""Keys that a chat template renders beside the messages."""
OF_ROWS = ("weight", "sample_weight", "loss_weight", "loss_scale")
"""Keys that weight a whole row. Here all count alike."""
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Fields beside token ids, by the names of TRL and others: 1 for a token that is learnt, 0 for others."""
PACKED = ("position_ids", "seq_lengths", "cu_seqlens", "token_type_ids", "pixel_values")
"""Fields beside token ids that hold other inputs of a model."""
TARGETS = ("target_token_ids", "target_logprobs", "target_weights")
"""Keys beside token ids: for each token those that may stand in its place, and how likely or how heavy each is (soft.py)."""
_PROMPTS = "prompts are not learnt here; of a row with a text all is"
_MEDIA = "of texts and images alone a model is trained here"
_PAIR = "write preferences as prompt, chosen and rejected"
_VARIABLE = f"write it into {VARIABLES}"
UNREAD = {
    "videos": _MEDIA, "video": _MEDIA, "audios": _MEDIA, "audio": _MEDIA, "objects": "boxes are not read",
    "train_on_inputs": _PROMPTS, "train_on_input": _PROMPTS, "train_on_prompt": _PROMPTS, "roles_to_train": _PROMPTS,
    "kto_tag": "write it as label", "rejected_response": _PAIR, "rejected_messages": _PAIR,
    "chat_template": "the chat template is that of the job: see data.chat_template",
    "enable_thinking": _VARIABLE, "reasoning_effort": _VARIABLE, "documents": _VARIABLE,
}  # fmt: skip
"""Keys that are refused where they hold something, with what to do."""
KEYS = frozenset({VARIABLES, LAST, SINGLE, *OF_ROWS, *UNREAD})


def check_flags(row: dict[str, Any], bad: Bad) -> None:
    """Raise an error if a row has a flag that is not honoured."""
    for key in OF_ROWS:
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or value != 1):
            raise bad(f"the row has the {key} {quoted(value)}, but all rows count alike; leave it out, or rename it")
    for key, remedy in UNREAD.items():
        if holds_something(row.get(key)):
            raise bad(f"the row has {key!r}, which is not read; {remedy}")
    for key in (LAST, SINGLE):
        if row.get(key) not in (None, True, False):
            raise bad(f"{key!r} is true or false, found {quoted(row[key])}")


def check_no_conversation(row: dict[str, Any], what: str, bad: Bad) -> None:
    """Raise an error if a row of texts or tokens has flags for the chat template, or for turns that are learnt."""
    for key in (VARIABLES, LAST, *SHOWN):
        value = row.get(key)
        if holds_something(unpacked(value, repr(key), bad) if key in (VARIABLES, "tools", "functions") else value):
            raise bad(f"{key!r} goes with a prompt or messages, and the row is one of {what}")


def variables(row: dict[str, Any], bad: Bad) -> dict[str, Any]:
    """Values of the chat template's own variables."""
    given = unpacked(row.get(VARIABLES), repr(VARIABLES), bad)
    if not holds_something(given):
        return {}
    if not isinstance(given, dict):
        raise bad(f"{VARIABLES!r} must be a mapping, found {kind_of(given)}")
    check_parts(given, repr(VARIABLES), bad)
    for key in given:
        check_text(key, f"a key of {VARIABLES!r}", bad)
        if key in OF_RENDERING:
            raise bad(f"{VARIABLES!r} has {key!r}, which is no variable of a chat template; leave it out")
    return given
