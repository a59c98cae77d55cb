"""Hooks of mkdocs.yml: pages that lie outside docs/, and links as the repository has them.

The site's start page is README.md; CONTRIBUTING.md, CHANGELOG.md, the log and the results of benchmarks are part of it too. In
the repository all links are relative and work there; here each is turned into that of the same file on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Beside docs/, and their names on the site."""
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def place_on_site(path: str) -> str:
    """The name on the site of a file of the repository, both with their folders."""
    return PAGES.get(path, path.removeprefix("docs/"))


def link_on_site(page: str, target: str) -> str:
    """A link of a page of the repository, as the page on the site has it."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return posixpath.relpath(place_on_site(path), posixpath.dirname(place_on_site(page)) or ".")


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
    from mkdocs.structure.files import File

    benchmarks = ROOT / "benchmarks"
    outside = [ROOT / name for name in PAGES] + [benchmarks / "LOG.md", *sorted((benchmarks / "results").iterdir())]
    for path in outside:
        files.append(File.generated(config, place_on_site(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Turn the links of a page."""
    own = next((path for path, name in PAGES.items() if name == page.file.src_uri), None)
    if own is None:
        own = page.file.src_uri if page.file.src_uri.startswith("benchmarks/") else f"docs/{page.file.src_uri}"
    return LINK.sub(lambda link: f"]({link_on_site(own, link[1])}{link[2] or ''})", markdown)
