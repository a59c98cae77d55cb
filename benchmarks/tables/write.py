"""Write docs/benchmarks.md and the README's table from the files in benchmarks/results: no figure without its source.

docs/benchmarks.md holds all tables, each with the commit and the day of its file; the README holds one table of ratios, whose
rows lead there.

python -m benchmarks tables
"""

from __future__ import annotations

import re

from benchmarks.tables import result_files
from benchmarks.tables.anchors import readme_table
from benchmarks.tables.result_files import measured, ratio, results
from benchmarks.tables.sections import SECTIONS, TITLES, anchor

STEPS = " | | | |"
"""Cells of a row of the README's table whose times are not over a frozen model's: it times whole optimizer steps."""
STEPS_COUNTED = re.compile(r"(The last )(?:row times|\w+ rows time)( whole optimizer steps)")
FIRST = re.compile(r"(<!-- anchors: .*? -->)\n.*?(<!-- /anchors -->)", re.DOTALL)
MARKS = re.compile(r"(<!-- figures: .*? -->\n).*?(<!-- /figures -->)", re.DOTALL)


LINKS = re.compile(r"\[([\w-]+)\.json\]\(\.\./benchmarks/results/\1\.json\)")


def _dated(link: re.Match[str]) -> str:
    """Behind a link to results, the commits and the day they were measured at: the code may have changed since."""
    file = results(link[1])
    rows = [
        row["measured"] for row in file["rows"] if isinstance(row.get("measured"), dict) and "commit" in row["measured"]
    ]
    commits = dict.fromkeys(made["commit"][:7] for made in (file, *rows))
    return f"{link[0]}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {file['date'][:10]}"


def _between_marks(page: str, text: str) -> str:
    return MARKS.sub(lambda match: match[1] + "\n" + text + "\n" + match[2], page)


def filled(page: str) -> str:
    """docs/benchmarks.md with its figures brought up to date; a section without a results file is left out."""
    parts = [(section, lines) for section in SECTIONS if (lines := section())]
    text = "\n".join(line for section, lines in parts for line in (f"## {TITLES[section.__name__]}", "", *lines, ""))
    return _between_marks(page, LINKS.sub(_dated, text))


# --- the README's table ------------------------------------------------------------------------------------------------


def _compared(
    title: str,
    own: tuple[float, float | None],
    peer: tuple[float, float | None],
    section: str,
    paired: float | None = None,
) -> str:
    """A row of the overview. own, peer: time over that of the frozen model (with the host's launches, of the GPU alone).
    paired: median over rounds of PEFT's time over packlora's, where it was taken, as in the section; else that of own, peer."""
    cells = ["-" if value is None else ratio(value) for value in (*own, *peer)]
    last = peer[0] / own[0] if paired is None else paired
    return f"| {title} | {' | '.join(cells)} | {last:.2f}x | {_source(section)} |"


def _source(section: str) -> str:
    return f"[{TITLES[section]}](docs/benchmarks.md#{anchor(section)})"


def _overview_rows() -> list[str]:
    """At most eleven rows; those whose results are not there are left out."""
    rows = []
    for name, title, lengths in (
        ("layer", "one layer, LoRA r 16", (8192, 2048)), ("multi", "one layer, four LoRA adapters", (8192,))
    ):  # fmt: skip
        if (file := measured(f"{name}-h200")) is not None:
            for T in lengths:
                keys = (f"over_frozen_T{T}_geomean", f"ahead_over_frozen_T{T}_geomean")
                own, peer = (tuple(file["summary"].get(f"{key}{tail}") for key in keys) for tail in ("", "_peft_bf16"))
                rows.append(_compared(f"{title}, {T} tokens", (own[0], own[1]), (peer[0], peer[1]), name))
    if (file := measured("dora-h200")) is not None:
        start, summary = "r16_4096_over_frozen", file["summary"]
        own, peer = (
            (summary[f"{who}_{start}_wall"], summary[f"ahead_{who}_{start}"])
            for who in ("accelerate", "peft_bf16_layer")
        )
        rows.append(_compared("one layer 4096 x 4096, DoRA r 16, 8192 tokens", own, peer, "dora"))
    if measured("small-h200") is None and (file := measured("graphs-h200")) is not None:  # eleven rows at most
        summary = file["summary"]
        own, peer = (summary[f"llama60m_{key}over_frozen"] for key in ("", "peft_bf16_"))
        tokens = next(row["T"] for row in file["rows"] if row["case"] == "llama60m")
        rows.append(_compared(f"Llama 60M, LoRA r 8, {tokens} tokens", (own, None), (peer, None), "graphs"))
    if (file := measured("model-h200")) is not None:
        for key, title in (("lora_r16", "LoRA r 16"), ("dora_r384", "DoRA r 384")):
            own, peer = (file["summary"][f"{start}{key}_over_frozen"] for start in ("", "peft_"))
            rows.append(_compared(f"Llama-3.1-8B's shape, {title}, 8192 tokens", (own, None), (peer, None), "model"))
    if (file := measured("quantised-h200")) is not None:
        row = next(row for row in file["rows"] if row["jobs"] == 1 and not row["dora"])
        own, peer = (row["over_frozen"][name] for name in ("packlora", "peft_bnb"))
        title = "Llama-3.1-8B's shape in 4 bits, LoRA r 16, 8192 tokens"
        rows.append(_compared(title, (own, None), (peer, None), "four_bits", row["vs_peft_bnb"]))
    if (file := measured("experts-h200")) is not None:
        row = next(row for row in file["rows"] if row["case"] == "1job lora_r16 T8192")
        own, peer = (row["over_frozen"][name] for name in ("packlora", "peft"))
        title = "Qwen3-30B-A3B's shape, LoRA r 16 on experts too, 8192 tokens"
        rows.append(_compared(title, (own, None), (peer, None), "experts", row["vs_peft"]))
    for name, start, title, section in (
        ("small-h200", "train_06b_vs_peft_best", "four jobs of short samples at once, 0.6B shape", "every_mode"),
        (
            "workloads-h100",
            "workloads_vs_peft_best",
            "LoRAFusion's workloads, four jobs, 8B's shape, an H100",
            "workloads",
        ),
        ("speed-cpu", "one_job_vs_peft_", "one job, SmolLM2-135M on two CPU threads", "speed"),
    ):
        if (file := measured(name)) is not None:
            fastest = min(value for key, value in file["summary"].items() if key.startswith(start))
            rows.append(f"| {title} |{STEPS} {fastest:.2f}x | {_source(section)} |")
    return rows


def overview() -> list[str]:
    """One table of ratios."""
    return [
        "| work | packlora over frozen | GPU alone | PEFT over frozen | GPU alone | PEFT over packlora | all figures |",
        "|---|---|---|---|---|---|---|",
        *_overview_rows(),
    ]


def with_overview(readme: str) -> str:
    """The README with its tables brought up to date, and the sentence that counts the rows of whole optimizer steps."""
    readme = FIRST.sub(lambda match: "\n".join((match[1], "", *readme_table(), "", match[2])), readme)
    lines = overview()
    number = {1: "row times", 2: "two rows time", 3: "three rows time", 4: "four rows time"}[
        sum(STEPS in line for line in lines)
    ]
    return _between_marks(STEPS_COUNTED.sub(rf"\1{number}\2", readme), "\n".join(lines) + "\n")


def main() -> None:
    """Write both pages."""
    for path, fill in (
        (result_files.ROOT / "docs" / "benchmarks.md", filled),
        (result_files.ROOT / "README.md", with_overview),
    ):
        path.write_text(fill(path.read_text()))
