"""Other projects' kernels: where they come from, and fetching them. They are measured beside ours and are no part of packlora.

Each is taken at one commit, which git checks, into peers/<name>-<commit> of packlora's cache (PACKLORA_CACHE); a folder that is
there is used as it is, so it may be carried to a machine without a network.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packlora.errors import InputError
from packlora.plans.identity import cache_root

TIMEOUT_S = 600
"""Limit of one call of git."""


@dataclass(frozen=True, slots=True)
class Source:
    """paths: what is taken of the repository. root: the folder in it that packages are in."""

    url: str
    commit: str
    paths: tuple[str, ...]
    root: str = ""


SOURCES = {
    "unsloth": Source(
        "https://github.com/unslothai/unsloth", "015bdef0d94a241bcd94eec7a405b1700632180d",
        ("unsloth",),
    ),
    "axolotl": Source(
        "https://github.com/axolotl-ai-cloud/axolotl", "067b021c8b87a9e5e380b9173c704cf7340e30f5",
        ("src/axolotl/kernels",), "src",
    ),
    "lorafusion": Source(
        "https://github.com/CentML/lorafusion", "c48d7fdb1b5458e9df00963a63df00436f89a059",
        ("lorafusion",),
    ),
}  # fmt: skip


def folder_of(name: str) -> Path:
    """Folder of a project's source once it is fetched."""
    return cache_root() / "peers" / f"{name}-{SOURCES[name].commit[:12]}"


def fetched(name: str) -> Path:
    """The folder that holds a project's packages; fetched where it is not there.

    Raises:
        InputError: it cannot be fetched or written.
    """
    source, folder = SOURCES[name], folder_of(name)
    if not folder.exists():
        print(f"fetching {source.url} at {source.commit[:12]}", flush=True)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                made = Path(scratch) / "source"
                _git("init", "-q", str(made))
                _git("-C", str(made), "fetch", "-q", "--depth", "1", source.url, source.commit)
                _git("-C", str(made), "checkout", "-q", source.commit, "--", *source.paths)
                shutil.rmtree(made / ".git")
                made.rename(folder)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise InputError(
                f"{name} cannot be fetched from {source.url}: {said}; where there is no network, put "
                f"{', '.join(source.paths)} of commit {source.commit} into {folder}"
            ) from None
    return folder / source.root


def _git(*words: str) -> None:
    subprocess.run(["git", *words], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
