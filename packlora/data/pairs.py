"""A row of preferences as two rows of a prompt and a completion: the chosen one and the rejected one.

The prompt stands for itself, or is what both conversations, or both texts, begin with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packlora.data.flags import LAST, SHOWN, SINGLE, VARIABLES

Bad = Callable[[str], Exception]
SHARED = (*SHOWN, VARIABLES, LAST, SINGLE)
GREETING = 3
"""Words of a prompt that the answers to it may begin with by themselves."""


def halves(value: dict[str, Any], bad: Bad) -> tuple[dict[str, Any], dict[str, Any]]:
    """Join `chosen` and `rejected` with their prompt into rows {prompt, completion}, texts or lists of messages.

    Args:
        value: with `chosen` and `rejected`, and perhaps `prompt`.
        bad: makes the error of a problem.
    """
    prompt, chosen, rejected = value.get("prompt"), value["chosen"], value["rejected"]
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        from packlora.data.foreign import asked

        prompt = asked(prompt, chosen, rejected)
    given = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    found = {name: part for name, part in given.items() if part is not None}
    for kind in (str, list):
        if all(isinstance(part, kind) for part in found.values()):
            break
    else:
        kinds = ", ".join(f"{name} {type(part).__name__}" for name, part in found.items())
        raise bad(
            f"the parts of a preference are all texts or all lists of messages; found {kinds}"
            + ", and the lists do not begin with the prompt; name the parts by data.columns" * isinstance(prompt, str)
        )
    if isinstance(prompt, str) and _stands_twice(prompt, chosen, rejected):
        raise bad(
            "'chosen' and 'rejected' begin with the prompt, so the model would see it twice; leave 'prompt' out, which is then "
            "what both begin with, or, where an answer does repeat what was asked, give lists of messages"
        )
    if prompt is not None and chosen == rejected:
        raise bad("'chosen' and 'rejected' are the same, so there is no preference to learn")
    if prompt is None:
        start = _prompt_length(chosen, rejected)
        if start == 0 or start in (len(chosen), len(rejected)):
            what = "do not begin alike" if start == 0 else "differ in nothing that comes after a prompt"
            raise bad(f"there is no 'prompt', and 'chosen' and 'rejected' {what}; give the prompt")
        prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
    shared = {key: value[key] for key in SHARED if value.get(key) is not None}
    return {"prompt": prompt, "completion": chosen} | shared, {"prompt": prompt, "completion": rejected} | shared


def _stands_twice(prompt: str, *completions: str) -> bool:
    """Whether all completions have the prompt before the answer. Answers may well repeat a greeting, so a short one does not
    count."""
    said = prompt.strip()
    return len(said.split()) > GREETING and all(own.lstrip().startswith(said) for own in completions)


def _prompt_length(chosen: Any, rejected: Any) -> int:
    """Length of the common beginning of two texts, or conversations; without the space before the difference."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    return same - 1 if same and chosen[same - 1] == " " else same
