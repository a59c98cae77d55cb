"""Write the README's figures from the files in benchmarks/results, so that none stands there without its source.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MARKS = re.compile(r"(<!-- figures: .*? -->\n).*?(<!-- /figures -->)", re.DOTALL)


def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return loaded


def parity() -> list[str]:
    """Loss differences to PEFT."""
    file = results("parity-cpu")
    summary = file["summary"]
    lines = [
        f"Against real PEFT, {file['rows'][0]['steps']} optimizer steps on SmolLM2-135M in float32, the same samples in the "
        "same order, from the same initial adapter ([parity-cpu.json](benchmarks/results/parity-cpu.json)):",
        "",
        "| adapter | trained | mean loss difference | largest | final adapters differ by |",
        "|---|---|---|---|---|",
    ]
    for kind, title in (("lora", "LoRA"), ("rslora", "rsLoRA"), ("dora", "DoRA")):
        for setting, words in (("solo", "alone"), ("shared", "beside three other jobs")):
            mean, largest, apart = (summary[f"{kind}_{setting}_{key}"] for key in ("mean", "max", "adapter"))
            lines.append(f"| {title} | {words} | {mean:.1e} | {largest:.1e} | {apart:.1e} |")
    return lines


def speed() -> list[str]:
    """Tokens per second against PEFT."""
    file = results("speed-cpu")
    summary = file["summary"]
    lines = [
        f"Training speed on a CPU ({file['device']}), SmolLM2-135M in float32, real tokens per second, paired in one loop "
        "([speed-cpu.json](benchmarks/results/speed-cpu.json)):",
        "",
        "| work | packlora | PEFT, packed batches | PEFT, padded batches |",
        "|---|---|---|---|",
    ]
    for key, words in (("one_job", "one LoRA r 8 job"), ("four_jobs", "four LoRA jobs (PEFT: one after the other)")):
        own = f"{summary[f'{key}_packlora_tokens_per_s']:.0f}"
        cells = [
            f"{summary[f'{key}_peft_{peer}_tokens_per_s']:.0f} ({summary[f'{key}_vs_peft_{peer}']:.2f}x)"
            for peer in ("packed", "padded")
        ]
        lines.append(f"| {words} | {own} | {' | '.join(cells)} |")
    lines += ["", "In brackets: PEFT's time over packlora's, median over steps."]
    return lines


def filled(readme: str) -> str:
    """The README with its figures brought up to date."""
    text = "\n".join([*parity(), "", *speed(), ""])
    return MARKS.sub(lambda match: match[1] + "\n" + text + "\n" + match[2], readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
