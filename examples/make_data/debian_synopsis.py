"""Make the data set debian_synopsis: a Debian package description -> its one-line synopsis.

The source is the file Translation-en of Debian 12 (bookworm), section main.  To get it without touching the
system's own package lists, on a Debian 12 machine:

    mkdir -p apt/lists/partial apt/cache/archives/partial
    apt-get -o Dir::State::lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt/cache -o Acquire::Languages=en update
    /usr/lib/apt/apt-helper cat-file apt/lists/*_bookworm_main_i18n_Translation-en* > translation-en.txt

Then, with a folder that holds the tokenizer.json of SmolLM2:

    python examples/make_data/debian_synopsis.py --translation translation-en.txt \\
        --tokenizer TOKENIZER_FOLDER --out examples/data/debian_synopsis
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from common import Candidate, Plan, is_derivable, load_tokenizer, select, words, write_set

PLAN = Plan(n_train=400, n_eval=24, min_tokens=50, max_tokens=260, max_overlap=0.15, group_limits={})
# Packages without a subject of their own: renamed, merged, generated or split off from another one.
_EMPTY = re.compile(r"transitional|dummy|metapackage|meta-package|debug(ging)? symbols", re.IGNORECASE)


def read_stanzas(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (package, synopsis, description) for each stanza of a Translation-en file."""
    for stanza in path.read_text(encoding="utf-8").split("\n\n"):
        package = synopsis = ""
        body: list[str] = []
        for line in stanza.splitlines():
            if line.startswith("Package: "):
                package = line.removeprefix("Package: ").strip()
            elif line.startswith("Description-en: "):
                synopsis = line.removeprefix("Description-en: ").strip()
            elif line.startswith(" "):
                body.append("" if line == " ." else line[1:].rstrip())
        if package and synopsis and body:
            yield package, synopsis, "\n".join(body).strip()


def candidates(path: Path) -> Iterator[Candidate]:
    """Turn the stanzas into rows; a package that occurs with several versions counts once."""
    seen: set[str] = set()
    for package, synopsis, body in read_stanzas(path):
        if package in seen or len(body) < 80 or _EMPTY.search(f"{package} {synopsis} {body}"):
            continue
        seen.add(package)
        prompt = f"Summarize this software package in one line.\n\nPackage: {package}\n{body}\n\nSummary:"
        yield Candidate(package, prompt, synopsis, f"{synopsis}\n{body}", (package,))


def accept(c: Candidate) -> bool:
    """Keep synopses of three words and more that can be written from the description."""
    return len(words(c.completion)) >= 3 and is_derivable(c.completion, c.prompt, 0.7)


def main() -> None:
    """Read the arguments and write the set."""
    parser = argparse.ArgumentParser(description="Make the data set debian_synopsis.")
    parser.add_argument("--translation", type=Path, required=True, help="the uncompressed Translation-en")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with SmolLM2's tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    train, held_out = select(candidates(args.translation), PLAN, load_tokenizer(args.tokenizer), accept)
    write_set(args.out, train, held_out, ("package",))


if __name__ == "__main__":
    main()
