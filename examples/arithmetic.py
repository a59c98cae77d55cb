"""Word problems of arithmetic, and their rewards, for examples/arithmetic.yaml.  python examples/arithmetic.py [FOLDER]

The problems are generated, always the same ones: FOLDER/train.jsonl and FOLDER/eval.jsonl, which share none. A row has the
prompt and the answer, which is handed to the rewards.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAIN, EVAL, SEED = 2000, 100, 7
ASK = "Think step by step. End with a line of the form 'Answer: NUMBER'."
NAMES = ("Ada", "Ben", "Chioma", "Dmitri", "Elif", "Farid", "Grace", "Hana", "Ivan", "Jun", "Kofi", "Lena")
THINGS = ("apples", "candles", "marbles", "stamps", "shells", "buttons", "postcards", "pears")
LAST_LINE = re.compile(r"Answer: (-?\d[\d,]*)\.?")
"""The form that is asked for."""

Draw = random.Random


def _shopping(draw: Draw) -> tuple[str, int]:
    name, a, b, n, m = draw.choice(NAMES), *(draw.randint(11, 95) for _ in "ab"), *(draw.randint(2, 9) for _ in "nm")
    return (
        f"A pencil costs {a} cents and a notebook costs {b} cents. {name} buys {n} pencils and {m} notebooks. "
        f"How many cents does {name} pay?",
        a * n + b * m,
    )


def _picking(draw: Draw) -> tuple[str, int]:
    name, thing, a, n = draw.choice(NAMES), draw.choice(THINGS), draw.randint(6, 40), draw.randint(3, 12)
    given = draw.randint(2, a * n - 1)
    return (
        f"{name} collects {a} {thing} a day for {n} days, and then gives {given} of them away. "
        f"How many {thing} are left?",
        a * n - given,
    )


def _sharing(draw: Draw) -> tuple[str, int]:
    thing, friends, each, more = draw.choice(THINGS), draw.randint(2, 9), draw.randint(4, 30), draw.randint(2, 20)
    return (
        f"{friends} friends share {friends * each} {thing} equally. Then each of them finds {more} more. "
        f"How many {thing} does each of them have now?",
        each + more,
    )


def _journey(draw: Draw) -> tuple[str, int]:
    fast, slow, n, m = draw.randint(60, 120), draw.randint(20, 58), draw.randint(2, 6), draw.randint(2, 6)
    return (
        f"A train goes {fast} kilometres an hour for {n} hours, and then {slow} kilometres an hour for {m} hours. "
        "How many kilometres does it go in all?",
        fast * n + slow * m,
    )


def _ages(draw: Draw) -> tuple[str, int]:
    (one, two, three), age, times = draw.sample(NAMES, 3), draw.randint(5, 19), draw.randint(2, 4)
    less = draw.randint(1, age * times - 1)
    return (
        f"{one} is {age} years old. {two} is {times} times as old as {one}, and {three} is {less} years younger than {two}. "
        f"How old is {three}?",
        age * times - less,
    )


KINDS: tuple[Callable[[Draw], tuple[str, int]], ...] = (_shopping, _picking, _sharing, _journey, _ages)


def problems(count: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Rows of so many problems, no two of which are the same; more of them begin with the same ones."""
    draw, found = Draw(seed), dict[str, int]()
    while len(found) < count:
        question, answer = draw.choice(KINDS)(draw)
        found.setdefault(question, answer)
    return [
        {"prompt": [{"role": "user", "content": f"{question} {ASK}"}], "answer": answer}
        for question, answer in found.items()
    ]


def write(folder: Path, train: int = TRAIN, held_out: int = EVAL) -> None:
    """Write the files."""
    rows = problems(held_out + train)
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in (("eval", rows[:held_out]), ("train", rows[held_out:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


# --- rewards ---------------------------------------------------------------------------------------------------------------


def _last_line(completion: Any) -> re.Match[str] | None:
    lines = completion[0]["content"].strip().splitlines()
    return LAST_LINE.fullmatch(lines[-1].strip()) if lines else None


def correct(prompts: list[Any], completions: list[Any], answer: list[int], **columns: list[Any]) -> list[float]:
    """1 for the exact answer in a last line of the form that is asked for."""
    found = [_last_line(one) for one in completions]
    return [
        float(line is not None and int(line[1].replace(",", "")) == own)
        for line, own in zip(found, answer, strict=True)
    ]


def form(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
    """1 for such a last line, whatever the answer, so that there is something to learn before answers are right."""
    return [float(_last_line(one) is not None) for one in completions]


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "runs" / "arithmetic-data")
