"""Print the size and the token lengths of the data sets as a Markdown table, and check the files.

    python examples/make_data/stats.py --tokenizer TOKENIZER_FOLDER examples/data/*/

A length is that of prompt and completion together, without chat template.  The last column is the largest
share of four-word runs that an evaluation row has in common with one training row, the words of the template
included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import NearDuplicates, count_tokens, is_clean, load_tokenizer, shingles


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Read a file of rows; stop at the first one that is not as it should be."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        prompt, completion = row["prompt"], row["completion"]
        if set(row) != {"prompt", "completion"} or not completion.strip() or not is_clean(prompt + completion):
            raise SystemExit(f"{path}, row {number}: not a clean pair of prompt and completion")
        rows.append((prompt, completion))
    if len({p for p, _ in rows}) != len(rows):
        raise SystemExit(f"{path}: a prompt occurs twice")
    return rows


def percentile(values: list[int], share: float) -> int:
    """Nearest-rank percentile."""
    return sorted(values)[max(0, -(-int(share * 100) * len(values) // 100) - 1)]


def main() -> None:
    """Print one line for each file."""
    parser = argparse.ArgumentParser(description="Measure the data sets.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with SmolLM2's tokenizer.json")
    parser.add_argument("sets", type=Path, nargs="+")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    print("| set | file | rows | bytes | mean | min | p5 | p50 | p95 | max | answer mean | overlap |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for folder in args.sets:
        seen = NearDuplicates()
        for name in ("train.jsonl", "eval.jsonl"):
            rows = read_rows(folder / name)
            lengths = [count_tokens(tokenizer, p, c) for p, c in rows]
            answers = [count_tokens(tokenizer, "", c) for _, c in rows]
            runs = [shingles(f"{p}\n{c}") for p, c in rows]
            overlap = "-"
            if name == "train.jsonl":
                for r in runs:
                    seen.add(r)
            else:
                overlap = f"{max(map(seen.overlap, runs)):.2f}"
            cells = [folder.name, name, len(rows), (folder / name).stat().st_size]
            cells += [f"{sum(lengths) / len(rows):.0f}", min(lengths)]
            cells += [percentile(lengths, s) for s in (0.05, 0.5, 0.95)]
            cells += [max(lengths), f"{sum(answers) / len(rows):.0f}", overlap]
            print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
