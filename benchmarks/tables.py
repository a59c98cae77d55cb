"""The tables of README.md and pages of docs, written from the files in benchmarks/results: no figure without its source.

A comment before a table says what its rows are; its head is written by hand:

    <!-- table
    layer-h200 main=true T=8192: {K} x {N} | {ms[frozen]:.3f} | {over_frozen[packlora]:.2f}
    layer-h200 summary: geometric mean | | {over_frozen_T8192_geomean:.2f}
    -->

Each line names a file, a view of it (its rows, unless another one is named) and what the rows must have, then the cells. A
sentence with figures is written by hand too, with a comment in its paragraph that says which figures it must have:

    <!-- check quantised-h200 summary: {one_job_vs_peft_bnb:.2f}x -->
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import MODES
from benchmarks.fit import CARDS, PEFT_WAYS
from benchmarks.harness import Row
from benchmarks.small import OWN, PEER, against_peft, best_mode, wall

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/megatron.md", "docs/run-file.md")
TABLE = re.compile(r"(<!-- table\n((?:.+\n)+?)-->\n\n\|.*\n\|[-|]+\|\n)(?:\|.*\n)*")
CHECK = re.compile(r"<!-- check (\S+)([^:]*): (.*?) -->")
LINK = re.compile(
    r"(\[([\w-]+)\.json\]\(\.\./benchmarks/results/\2\.json\))(?:, commits? [0-9a-f]{7}(?:, [0-9a-f]{7})*, \d{4}-\d\d-\d\d)?"
)
TITLES = {
    "frozen": "frozen", "packlora": "packlora", "packlora_recompute": "packlora, recompute=True, keep_outputs=True",
    "packlora_stepped": "packlora, norms in every pass", "peft_bf16": "PEFT", "peft_fp32_autocast": "PEFT, fp32 adapters",
    "peft_bnb": "PEFT with bitsandbytes", "sequential": "packlora, one job after the other", "peft_packed": "PEFT, packed",
    "peft_rows": "PEFT, rows cut without regard to samples", "peft_packed_liger": "PEFT, packed, liger-kernel",
    "peft_rows_liger": "PEFT, rows, liger-kernel", "peft_compiled": "PEFT, compiled, one shape",
    "no_flush": "of all jobs, without a flush", "fixed_samples": "of all jobs, of a fixed number of samples",
    "one_job": "of one job after the other, with a flush",
    "one_job_fixed": "of one job after the other, of a fixed number of samples, with a flush",
    "eager_no_flush": "of all jobs, without a flush, LoRA in plain operations",
    "eager_fixed_samples": "of all jobs, of a fixed number of samples, LoRA in plain operations",
    "eager_one_job_fixed": "of one job after the other, of a fixed number of samples, with a flush, LoRA in plain operations",
    "fsdp2": "of one job after the other, on a sharded base",
}  # fmt: skip
"""Contenders and ways in words."""


CHOICES = {
    "max_tokens_per_microbatch": "m", "gradient_checkpointing": "c", "offload_embedding": "e", "activation_offloading": "a",
}  # fmt: skip
"""Letters of what `fit` chooses."""


def results(name: str) -> Row:
    """A results file, or two joined by `+`: the first with the second's rows of cases that it lacks, which are marked `other`.
    Raises ValueError for a part of a benchmark, which is not for pages."""
    name, _, second = name.partition("+")
    file: Row = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    if any(key.startswith("part_") for key in file["summary"]):
        raise ValueError(f"{name}.json holds a part of the benchmark")
    if second:
        known = {row["case"] for row in file["rows"]}
        file["rows"] += [row | {"other": True} for row in results(second)["rows"] if row["case"] not in known]
    return file


# --- views -------------------------------------------------------------------------------------------------------------


def by_contender(file: Row) -> list[Row]:
    """A row for each contender of a case that was timed: title, own_ms, over, own_gib."""
    return [
        row | {"title": TITLES[name], "own_ms": ms, "over": row["over_frozen"].get(name, 1.0), "own_gib": row["gib"][name]}
        for row in file["rows"]
        for name, ms in row["ms"].items()
        if name in TITLES and "gib" in row
    ]  # fmt: skip


def by_case(file: Row) -> list[Row]:
    """Anchors: a row for each case, with a cell for each contender (and its rate alone), and what others published."""
    out: dict[str, Row] = {}
    for row in file["rows"]:
        own = out.setdefault(row["case"].split()[0], {"of": row["case"].split()[0]})
        rate, published = row["tokens_per_s"], row["published"]
        own[row["contender"]] = row["error"] if rate is None else f"{rate:,.0f} ({row['gib']:.0f} GiB)"
        own[f"{row['contender']}_rate"] = row["error"] if rate is None else f"{rate:,.0f}"
        own["others"] = ", ".join(f"{who} {figure:,}" for who, figure in published.items()) or "-"
        if published:
            unsloth = published.get("Unsloth", published.get("Unsloth NF4"))
            own["unsloth"] = "-" if unsloth is None else f"{unsloth:,}"
            fastest = max((name for name in published if not name.startswith("Unsloth")), key=published.__getitem__)
            own["fastest_other"] = f"{fastest} {published[fastest]:,}"
    return list(out.values())


def by_way(file: Row) -> list[Row]:
    """A row for each way to train: rate, with_start, start and own, packlora's rate over it."""
    return [
        row | {"title": TITLES[way], "rate": rate, "with_start": row["with_start_tokens_per_s"][way],
               "start": row["start_s"][way], "own": "" if way == OWN else f"{row['tokens_per_s'][OWN] / rate:.2f}x"}
        for row in file["rows"] if isinstance(row.get("tokens_per_s"), dict)
        for way, rate in row["tokens_per_s"].items() if way in TITLES
    ]  # fmt: skip


def by_mode(file: Row) -> list[Row]:
    """Models of `small`: times of each contender in every mode, and PEFT's best over packlora's best."""
    out = []
    rows = [row for row in file["rows"] if row["part"] == "models"]
    for of in dict.fromkeys(row["of"] for row in rows):
        times = {row["mode"]: wall(row) for row in rows if row["of"] == of}
        own: Row = {"of": of.removeprefix("model ").replace("_", " "), "best": against_peft(rows, of)}
        for name in ("frozen", OWN, PEER):
            own[name] = " / ".join(f"{times[mode][name]:.1f}" if name in times.get(mode, {}) else "-" for mode in MODES)
        out.append(own)
    return out


def behind(file: Row) -> list[Row]:
    """Single layers of `small` that PEFT computes faster on the wall, each side in its best mode, the worst first."""
    rows = [row for row in file["rows"] if row["part"] == "layers"]
    ratios = {of: against_peft(rows, of) for of in dict.fromkeys(row["of"] for row in rows)}
    found = sorted((ratio, of) for of, ratio in ratios.items() if ratio is not None and ratio < 1)
    return [
        {
            "of": of, "ratio": ratio, "ours": best_mode(rows, of, OWN), "theirs": best_mode(rows, of, PEER),
            "count": len(found), "all": len(ratios),
        }
        for ratio, of in found
    ]  # fmt: skip


def transposed(file: Row) -> list[Row]:
    """`peers`: a row for each contender, with its ratios of the GPU alone / on the wall in every case."""
    out = []
    for name in dict.fromkeys(name for row in file["rows"] for name in row["over_frozen"]):
        cells = [
            [row.get(kind, {}).get(name) for kind in ("ahead_over_frozen", "wall_over_frozen")] for row in file["rows"]
        ]
        out.append(
            {
                "name": name,
                "cells": ["-" if None in both else " / ".join(f"{one:.2f}" for one in both) for both in cells],
            }
        )
    return out


def wire(file: Row) -> list[Row]:
    """`tensor-parallel`: what a step sends beside the frozen layers."""
    out = []
    for row in file["rows"]:
        sent, stepped = (row["messages"].get(name) for name in ("frozen", "packlora_stepped"))
        more = (
            {"more": stepped["collectives"] - sent["collectives"], "wire": stepped["sent"] / sent["sent"]}
            if sent and stepped
            else {}
        )
        out.append(row | more | {"sp": "yes" if row["sequence"] else "no"})
    return out


def stages(file: Row) -> list[Row]:
    """`pipeline`: medians over units by number of processes, shape and way."""
    out = []
    for size, shape in dict.fromkeys((row["processes"], row["shape"]) for row in file["rows"]):
        of = [row for row in file["rows"] if (row["processes"], row["shape"]) == (size, shape)]
        for way in TITLES:
            own = [row[way] for row in of if way in row and "s" in row[way]]
            if own:
                bubbles = [one["bubble"] for one in own if "bubble" in one]
                out.append({
                    "processes": size, "shape": shape, "title": TITLES[way], "s": statistics.median(one["s"] for one in own),
                    "rate": statistics.median(one["tokens"] / one["s"] for one in own),
                    "bubble": f"{statistics.median(bubbles):.1%}" if bubbles else "",
                })  # fmt: skip
    return out


def cosines(file: Row) -> list[Row]:
    """`dora-fidelity`: how far each cosine is from 1, in the mean and for the worst token."""
    pairs = ("packlora_exact", "peft_exact", "base_exact")
    return [
        {"case": row["case"], **{pair: f"{1 - row[pair]['mean']:.1e} ({1 - row[pair]['min']:.1e})" for pair in pairs}}
        for row in file["rows"]
    ]


def cards(file: Row) -> list[Row]:
    """`fit`: a row for each model and its weights, with a cell for each card: tokens a second, peak of reserved memory and, by
    its letter in CHOICES, what was chosen; `no` where nothing fits; * for another GPU's. The smallest model comes first."""
    rows = {row["case"]: row for row in file["rows"]}
    out: dict[str, Row] = {}
    for row in (row for row in rows.values() if row["part"] == "card"):
        own = out.setdefault(f"{row['shape']} {row['form']}", {"shape": row["shape"], "form": row["form"]})
        done = rows.get(row.get("as", row["case"]), {})
        letters = "".join(letter for key, letter in CHOICES.items() if key in row["chosen"])
        found = done.get("tokens_per_s")
        text = f"{found:,.0f} ({done['gib']:.1f}) {letters}".strip() if found else "-" if row["fits"] else "no"
        text += "\\*" if found and "other" in done else ""
        own[f"on_{row['card']}"] = text
    return sorted(out.values(), key=lambda own: float(own["shape"].removesuffix("B")))


def _measured(row: Row) -> str:
    return f"{row['gib']:.1f} ({row['tokens_per_s']:,.0f})" + ("\\*" if "other" in row else "")


def least_memory(file: Row) -> list[Row]:
    """`fit`: a row for each model, with GiB reserved (tokens a second) of the settings with the least memory and of PEFT."""
    rows = {row["case"]: row for row in file["rows"]}

    def text(label: str) -> str:
        row = rows.get(label, {})
        return _measured(row) if row.get("tokens_per_s") else "-"

    shapes = dict.fromkeys(row["shape"] for row in rows.values() if row["part"] == "least")
    names = ("least", "least_host", "least_eager", "least_offload", "peft")
    return [{"shape": shape, **{name: text(f"{shape} nf4 {name}") for name in names}} for shape in shapes]


def peft_cards(file: Row) -> list[Row]:
    """`fit`: as `cards`, for PEFT: the fastest of its ways whose memory in use fits."""
    rows = [row for row in file["rows"] if row["part"] == "peft" and row.get("tokens_per_s")]
    out: list[Row] = []
    for shape, form in dict.fromkeys((row["shape"], row["form"]) for row in rows):
        own, found = [row for row in rows if (row["shape"], row["form"]) == (shape, form)], Row(shape=shape, form=form)
        for card in CARDS:
            best = max(
                (row for row in own if row["allocated_gib"] <= card), key=lambda row: row["tokens_per_s"], default=None
            )
            found[f"on_{card}"] = "no" if best is None else _of_peft(best)
        out.append(found)
    return sorted(out, key=lambda own: float(own["shape"].removesuffix("B")))


def _of_peft(row: Row) -> str:
    letters = PEFT_WAYS[row["case"].split()[-1]][2]
    return f"{row['tokens_per_s']:,.0f} ({row['gib']:.1f}) {letters}".strip() + ("\\*" if "other" in row else "")


VIEWS: dict[str, Callable[[Row], list[Row]]] = {
    "rows": lambda file: file["rows"],
    "summary": lambda file: [file["summary"]],
    **{one.__name__: one for one in (
        by_contender, by_case, by_way, by_mode, behind, transposed, wire, stages, cosines, cards,
        peft_cards, least_memory,
    )},
}  # fmt: skip


# --- pages -------------------------------------------------------------------------------------------------------------


def lines_of(spec: str) -> list[list[str]]:
    """Cells of the rows that a line of a comment stands for."""
    head, _, template = spec.partition(": ")
    name, *words = head.split()
    view = words.pop(0) if words and "=" not in words[0] else "rows"
    wanted = dict(word.split("=", 1) for word in words)
    rows = [row for row in VIEWS[view](results(name)) if all(_holds(row, key, value) for key, value in wanted.items())]
    if not rows:
        raise ValueError(f"no row of {name}.json is meant by {spec!r}")
    return [[cell(one.strip(), row) for one in template.split("|")] for row in rows]


def _holds(row: Row, key: str, value: str) -> bool:
    """Return whether a row has `key=value`, or for `key!=value` another one; spaces are written as underscores."""
    own = str(row.get(key.rstrip("!"), False)).lower().replace(" ", "_")
    return (own == value.lower()) != key.endswith("!")


def cell(template: str, row: Row) -> str:
    """A cell's text; {a/b} is a quotient. `failed` or a dash where there is no figure."""
    try:
        quotient = lambda match: format(row[match[1]] / row[match[2]], match[3])  # noqa: E731
        return re.sub(r"\{(\w+)/(\w+):([^}]*)\}", quotient, template).format_map(row)
    except (KeyError, TypeError):
        named = re.search(r"\[([\w-]+)\]", template)
        return "failed" if named and named[1] in row.get("failed", {}) else "-"


def _table(match: re.Match[str]) -> str:
    rows = [cells for spec in match[2].splitlines() for cells in lines_of(spec)]
    return match[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _dated(match: re.Match[str]) -> str:
    """Put commits and day behind a link to results, for the code may have changed since."""
    file = results(match[2])
    made: list[Any] = [file, *(row.get("measured") for row in file["rows"])]
    commits = dict.fromkeys(one["commit"][:7] for one in made if isinstance(one, dict) and "commit" in one)
    return f"{match[1]}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {file['date'][:10]}"


def filled(page: str) -> str:
    """A page with its tables and the dates of its links brought up to date."""
    return LINK.sub(_dated, TABLE.sub(_table, page))


def missing(page: str) -> list[str]:
    """Figures that sentences should have, and have not."""
    out = []
    for paragraph in page.split("\n\n"):
        text = CHECK.sub("", paragraph)
        for match in CHECK.finditer(paragraph):
            first = lines_of(f"{match[1]}{match[2]}: {match[3].replace(' ', '|')}")[0]
            out += [
                f"{match[0]}: {figure}"
                for figure in first
                if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text)
            ]
    return out


def write() -> None:
    """Write the pages again."""
    for path in (ROOT / page for page in PAGES):
        path.write_text(filled(path.read_text()))
