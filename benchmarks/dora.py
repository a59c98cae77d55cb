"""`python -m benchmarks dora`: DoRA's norm, composition, layers, batches of adapters and whole models, in parts.

    python -m benchmarks dora --out dora-h200.json                             # all parts
    python -m benchmarks dora --out dora-h200.json --parts norm,compose        # these again; the file's other rows stay

Each part is a file of its own (dora_*.py). The part quality measures nothing: it takes the figures of
studies/dora_fidelity.py and studies/dora_convergence.py from their result files, which lie beside this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import dora_compose, dora_layer, dora_model, dora_norm, model
from benchmarks.options import PARTS, Options, Outcome
from benchmarks.results import device_slug, text_table
from packlora.errors import InputError

QUALITY = {
    "dora-fidelity": ("logit_cosine_min_float32", "logit_cosine_16bit_minus_peft"),
    "dora-convergence": ("convergence_mean_abs", "convergence_over_noise"),
}
"""Result files by the scripts' names, and the keys that are taken over; others of theirs stay where they are."""


def part_of(row: dict[str, Any]) -> str:
    part: str = row["part"]
    return part


def run(options: Options) -> Outcome:
    """Measure the parts that are asked for.

    Raises:
        InputError: `only` with more than one part, whose contenders and cases differ.
    """
    wanted = [part for part in PARTS["dora"] if options.wants(part)]
    if options.only and len(wanted) > 1:
        raise InputError(f"bench dora: --only needs one part; name it with --parts: {', '.join(PARTS['dora'])}")
    measure = {
        "norm": dora_norm.run, "compose": dora_compose.run, "layer": dora_layer.run, "multi": dora_layer.run_multi,
        "quality": quality,
    }  # fmt: skip
    rows = list(options.kept)
    for part in wanted:
        if part == "model":  # its liger-kernel changes transformers for good, and is not for Qwen3
            print(model.use_liger(options.device), flush=True)
            rows += dora_model.run_model(options)
        elif part in dora_model.CONTENDERS:
            rows += dora_model.run(options, part)
        else:
            rows += measure[part](options)
    rows.sort(key=lambda row: PARTS["dora"].index(part_of(row)))
    liger = "with liger-kernel where it is installed"
    protocol = " ".join(
        [dora_norm.PROTOCOL, dora_compose.PROTOCOL, dora_layer.PROTOCOL, dora_model.PROTOCOL.format(liger=liger)]
    )
    by_case = "compose" not in wanted  # its figures are means over cases
    return Outcome(protocol, rows, options.keys(summary(rows), by_case), table(rows))


def quality(options: Options) -> list[dict[str, Any]]:
    """Summaries of the two scripts; a file that is not there gives no row, and says so."""
    assert options.out is not None
    rows = []
    for name, keys in QUALITY.items():
        path = options.out.with_name(f"{name}-{device_slug(options.device)}.json")
        if not path.exists():
            print(f"quality: {path} is not there; python -m benchmarks {name} writes it", flush=True)
            continue
        taken = _taken(path, keys)
        if missing := [key for key, value in taken["figures"].items() if value is None]:
            print(f"quality: {path} has no {', '.join(missing)}; it was written before the study had them", flush=True)
        rows.append({"part": "quality", "case": name, **taken, "failed": {}})
    return rows


def _taken(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        file = json.loads(path.read_text())
        origin = {"commit": file["commit"], "date": file["date"], "device": file["device"]}
        figures = {key: file["summary"].get(key) for key in keys}
        return {"from": path.name, "measured": origin, "protocol": file["protocol"], "figures": figures}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"quality: {path} is not a result file with {', '.join(keys)}: {error!r}") from None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted, of the parts that there are; None where one could not be measured."""
    out: dict[str, Any] = {}
    by_part = {part: [row for row in rows if part_of(row) == part] for part in PARTS["dora"]}
    makers = {
        "norm": dora_norm.summary, "compose": dora_compose.summary, "layer": dora_layer.summary,
        "multi": dora_layer.summary_multi, "model": model.summary, "paper-model": dora_model.summary,
        "inference": dora_model.summary,
    }  # fmt: skip
    for part, make in makers.items():
        if by_part[part]:
            out |= make(by_part[part])
    taken: dict[str, Any] = {}
    for row in by_part["quality"]:
        taken |= row["figures"]
    return out | {key: taken.get(key) for keys in QUALITY.values() for key in keys}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each kind of part."""
    by_part = {part: [row for row in rows if part_of(row) == part] for part in PARTS["dora"]}
    layers = by_part["layer"] + by_part["multi"]
    models = by_part["model"] + by_part["paper-model"] + by_part["inference"]
    lines: list[str] = []
    for heads, body in (
        (["us", "/packlora", "peak MiB"], dora_norm.table(by_part["norm"])),
        (["us", "of copy", "peak MiB"], dora_compose.table(by_part["compose"])),
        (["us", "/frozen", "peak MiB"], dora_layer.table(layers)),
    ):
        if body:
            lines += [*text_table(["case", "contender", *heads], body), ""]
    if models:
        lines += [*dora_model.table(models), ""]
    lines += [f"{key}: {value}" for row in by_part["quality"] for key, value in row["figures"].items()]
    return lines
