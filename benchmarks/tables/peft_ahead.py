"""Cases in which the measured PEFT is ahead of packlora."""

from __future__ import annotations

from benchmarks.tables.every_mode import layers_behind
from benchmarks.tables.result_files import measured

NAMED = 3
"""Cases that are named, the worst, of a list that another section has whole."""


def peft_ahead() -> list[str]:
    """The section of docs/benchmarks.md: a list by work, with PEFT's time over packlora's."""
    found = []
    if (file := measured("layer-h200")) is not None:
        best = {row["case"]: min(row["vs_peft"].get("packlora", {"": None}).values()) for row in file["rows"]}
        rows = {case: value for case, value in best.items() if value is not None and value < 1}
        cases = ", ".join(f"{case} {value:.2f}x" for case, value in sorted(rows.items(), key=lambda item: item[1]))
        found += [f"{len(rows)} of {len(file['rows'])} single layers ({cases})"] if rows else []
    if (file := measured("experts-h200")) is not None:
        for row in file["rows"]:
            if row["vs_peft"] and row["vs_peft"] < 1:
                found.append(f"Qwen3-30B-A3B's shape, {row['case']} ({row['vs_peft']:.3f}x)")
    for name, where in (("small-h200", ""), ("small-h100", " on an H100")):
        if (file := measured(name)) is not None and (found_there := layers_behind(file["rows"]))[0]:
            layers, number = found_there
            some = ", ".join(f"{of} {value:.2f}x" for of, value in list(layers.items())[:NAMED])
            more = ", all [below](#small-models-in-every-mode)" if len(layers) > NAMED else ""
            found.append(f"{len(layers)} of {number} layers{where}, each compiled where that is faster ({some}{more})")
    if (file := measured("small-h200")) is not None:
        for key, work in (("06b", "0.6B shape"), ("8b", "8 layers of 8B")):
            for start, words in (("", ""), ("with_start_", ", the start counted")):
                value = file["summary"].get(f"train_{key}_{start}vs_peft_best")
                if value is not None and value < 1:
                    found.append(f"training four jobs on the {work}{words} ({value:.2f}x)".replace("the 8", "8"))
    if not found:
        return []
    return [
        "PEFT's fastest way is ahead of packlora, because there the host or a run's start sets the time, in:",
        "",
        *(f"- {case}" for case in found),
    ]
