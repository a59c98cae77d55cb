"""Make the data set manpages: the text of a manual page -> its one-line summary.

The source are manual pages of three Debian 12 packages.  To get and unpack them, and the program that renders
them (mandoc, version 1.14.6), on a Debian 12 machine:

    apt-get download libssl-doc libcurl4-doc ncurses-doc mandoc
    mkdir -p unpacked
    for deb in *.deb; do dpkg -x "$deb" "unpacked/${deb%%_*}"; done

Then, with a folder that holds the tokenizer.json of SmolLM2:

    python examples/make_data/manpages.py --unpacked unpacked --mandoc unpacked/mandoc/usr/bin/mandoc \\
        --tokenizer TOKENIZER_FOLDER --out examples/data/manpages

Only pages that state their licence themselves are taken; see licence_of.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from common import Candidate, Plan, is_derivable, load_tokenizer, select, words, write_set

PACKAGES = ("libcurl4-doc", "libssl-doc", "ncurses-doc")
PLAN = Plan(
    n_train=200,
    n_eval=12,
    min_tokens=320,
    max_tokens=860,
    max_overlap=0.3,
    group_limits={"libcurl4-doc": 90, "libssl-doc": 110, "ncurses-doc": 40},
)
# Sections without a subject matter; the copyright lines go into sources.tsv instead.
_LEFT_OUT = frozenset({"AUTHOR", "AUTHORS", "AVAILABILITY", "COPYRIGHT", "SEE ALSO"})
_ROFF_COPYRIGHT = re.compile(r"^\.\\\"[ *]*(Copyright [^\n]*?)[ *]*$", re.MULTILINE)
_HEADING = re.compile(r"^[A-Z][A-Z0-9 ,/-]+$")
_PLAIN = str.maketrans({"\u00a0": " ", "\u2010": "-", "\u2011": "-", "\u2212": "-", "\u2018": "'", "\u2019": "'"})


def render(mandoc: str, path: Path) -> dict[str, str]:
    """Render a page to plain text and return its sections by heading."""
    command = [mandoc, "-Tutf8", "-Owidth=100", str(path)]
    text = subprocess.run(command, capture_output=True, check=False).stdout.decode("utf-8")
    text = re.sub(".\b", "", text).translate(_PLAIN)  # bold and underlined letters are printed twice
    sections: dict[str, str] = {}
    heading = ""
    for line in text.splitlines()[1:-1]:  # without the header and footer lines
        if _HEADING.match(line):
            heading = line.strip()
            sections[heading] = ""
        elif heading:
            sections[heading] += re.sub("^ {1,7}", "", line.rstrip()) + "\n"
    sections = {k: re.sub(r"\n{3,}", "\n\n", v).strip("\n") for k, v in sections.items()}
    return {k: v for k, v in sections.items() if v}


def licence_of(roff: str, sections: dict[str, str]) -> tuple[str, str] | None:
    """Return (SPDX identifier, copyright lines) of a page that states a permissive licence, else None."""
    copyrights = "; ".join(_ROFF_COPYRIGHT.findall(roff))
    copyrights = re.sub(r",? *<[^>]*>", "", copyrights)
    if "Licensed under the Apache License 2.0" in sections.get("COPYRIGHT", ""):
        return "Apache-2.0", sections["COPYRIGHT"].splitlines()[0]
    if copyrights and "SPDX-License-Identifier: curl\n" in roff:
        return "curl", copyrights
    if copyrights and "Permission is hereby granted, free of charge" in roff and "with modifications" in roff:
        return "X11-distribute-modifications-variant", copyrights
    return None


def candidates(unpacked: Path, mandoc: str) -> Iterator[Candidate]:
    """Yield one candidate for each page; pages that are links to another page are left out."""
    for package in PACKAGES:
        for path in sorted((unpacked / package / "usr/share/man").rglob("man[1-8]/*.gz")):
            roff = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
            if path.is_symlink() or len(roff) > 40_000:
                continue
            sections = render(mandoc, path)
            licence = licence_of(roff, sections)
            name_line = " ".join(sections.pop("NAME", "").split())
            _, dash, summary = name_line.partition(" - ")
            if licence is None or not dash or not sections:
                continue
            stem, _, section = path.name.removesuffix(".gz").rpartition(".")
            body = "\n\n".join(f"{k}\n{v}" for k, v in sections.items() if k not in _LEFT_OUT)
            prompt = f"Summarize this manual page in one line.\n\n{stem}({section})\n\n{body}\n\nSummary:"
            source = (package, path.name.removesuffix(".gz"), *licence)
            yield Candidate(f"{package}/{path.name}", prompt, summary, f"{summary}\n{body}", source, package)


def accept(c: Candidate) -> bool:
    """Keep summaries of three words and more that can be written from the page."""
    return len(words(c.completion)) >= 3 and is_derivable(c.completion, c.prompt, 0.7)


def main() -> None:
    """Read the arguments and write the set."""
    parser = argparse.ArgumentParser(description="Make the data set manpages.")
    parser.add_argument("--unpacked", type=Path, required=True, help="one folder for each package")
    parser.add_argument("--mandoc", default="mandoc", help="the program mandoc")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with SmolLM2's tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = candidates(args.unpacked, args.mandoc)
    train, held_out = select(found, PLAN, load_tokenizer(args.tokenizer), accept)
    write_set(args.out, train, held_out, ("package", "page", "licence", "copyright"))


if __name__ == "__main__":
    main()
