"""Reading a base model from a folder or a hub id: its tokenizer, its architecture without weights, its weights.

What is there is checked against what config.json says, and refused in a sentence that names the base model. Nothing here
knows of packing: a model comes as transformers runs it, on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from packlora.base.classes import ClassOf, auto_class, own_class, twin_for, without_weights
from packlora.base.demo_model import DEMO_MODEL, base_path, check_place
from packlora.base.shape import check_sizes
from packlora.config import Run
from packlora.errors import InputError, foreign, plural, quoted
from packlora.form import is_stored, plugin, read_as_floats
from packlora.given import given
from packlora.ops.twin import set_twin, twin_of

LISTED = 8
"""Names of weights that a message lists."""
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
"""Prefixes of the names of a tokenizer's files."""
WRAPPED = ("_orig_mod.", "module.", "base_model.model.")
"""Prefixes of names that were saved with a wrapper around the model."""
OLD_BUFFERS = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$|\.inv_freq$")
"""Masks and frequencies that files of older versions hold and models now make themselves."""


def load_tokenizer(run: Run) -> Any:
    """The tokenizer of the base model, or the one that a Python program has handed over. Raises InputError when there is none,
    or none that can be used."""
    if given().tokenizer is not None:
        return given().tokenizer
    return read_tokenizer(base_path(run.base_model), run.revision, run.trust_remote_code)


def read_tokenizer(path: str, revision: str | None, trust_remote_code: bool = False) -> Any:
    """Read the tokenizer of a folder or a hub id."""
    if os.path.isdir(path) and not any(file.name.startswith(TOKENIZER_FILES) for file in Path(path).iterdir()):
        raise InputError(
            f"base_model {path!r}: the folder holds no tokenizer (tokenizer.json); save it there beside the weights"
        )
    tokenizer = load_part(
        "tokenizer",
        path,
        lambda: AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code),
    )
    if not isinstance(tokenizer.model_max_length, int | float):
        raise InputError(
            f"base_model {path!r}: the tokenizer's model_max_length is {quoted(tokenizer.model_max_length)}, not a number"
        )
    return tokenizer


def load_skeleton(run: Run) -> PreTrainedModel:
    """The model without weights (meta device): enough to find layers and count parameters. Raises InputError, also where a
    revision is given of a folder, which has none, or checkpoints of a model that has none."""
    loaded = given().model
    found: PreTrainedModel = _read_skeleton_of(run) if loaded is None else loaded.skeleton()
    if run.gradient_checkpointing and not found.supports_gradient_checkpointing:
        raise InputError(
            f"gradient_checkpointing: true is not for base_model {run.base_model!r}: transformers checkpoints no layer of a "
            f"{found.config.model_type} model; leave it out"
        )
    return found


def _read_skeleton_of(run: Run) -> PreTrainedModel:
    kind = "packaged" if run.base_model == DEMO_MODEL else "a folder" if os.path.isdir(run.base_model) else None
    if run.revision is not None and kind is not None:
        raise InputError(
            f"revision: {quoted(run.revision)} is of a model on a hub, and base_model {run.base_model!r} is {kind}; "
            "leave it out"
        )
    return read_skeleton(base_path(run.base_model), run.revision, run.trust_remote_code)


def read_skeleton(path: str, revision: str | None, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the model of a folder or a hub id without weights. Raises InputError, also for an encoder with a decoder."""
    config = read_config(path, revision, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"base_model {path!r}: packlora trains models that continue texts; this does not: it is an encoder with a decoder"
        )
    with torch.device("meta"):
        return model_of(config, path, trust_remote_code)


def own_skeleton(path: str, revision: str | None) -> tuple[PreTrainedModel, Any]:
    """The model without weights of the class that a folder or a hub id names, which other programs build; and the folder's
    configuration. Mostly it is that of read_skeleton."""
    config = read_config(path, revision)
    if (own := own_class(config)) is None:
        return read_skeleton(path, revision), config
    model = load_part("model", path, lambda: without_weights(own, config))
    set_twin(model, twin_for(own, config))
    return model, config


def read_config(path: str, revision: str | None, trust_remote_code: bool = False) -> Any:
    """The configuration of a folder or a hub id. Raises InputError where there is none, or none that is trained here."""
    check_place(path)
    config = load_part(
        "configuration",
        path,
        lambda: AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code),
    )
    if is_stored(config):
        plugin().check_config(config, path)
    check_sizes(config, path)
    return config


def model_of(config: Any, path: str, trust_remote_code: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model that a configuration describes, with random weights, and with the generation settings of its folder or hub id.
    dtype: None is the configuration's."""
    model = load_part(
        "model",
        path,
        lambda: auto_class(config).from_config(
            config,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",  # a configuration may name one that is code on the hub
            **({} if dtype is None else {"dtype": dtype}),
        ),
    )
    assert isinstance(model, PreTrainedModel)
    set_twin(model, load_part("model", path, lambda: twin_for(type(model), config)))
    load_part("generation settings", path, lambda: _set_generation(model, path, getattr(config, "_commit_hash", None)))
    return model


def _set_generation(model: PreTrainedModel, path: str, revision: str | None) -> None:
    with contextlib.suppress(OSError):  # there is no file: the configuration's own stay
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, revision=revision)


def read_model(
    path: str, revision: str | None, dtype: torch.dtype, trust_remote_code: bool = False,
    class_of: ClassOf = auto_class, **how: Any,
) -> PreTrainedModel:  # fmt: skip
    """The model of a folder or a hub id, as transformers runs it, on the CPU.

    Args:
        class_of: gives the class to build of the configuration of its folder; the one that is trained, unless given.
        how: more of from_pretrained's arguments.

    Raises:
        InputError: it cannot be loaded, or its weights are not those of its configuration.
    """
    check_files(path)
    config = read_config(path, revision, trust_remote_code)
    if read_as_floats(config):
        how["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    transformers.utils.logging.disable_progress_bar()
    kept = plugin().as_stored() if is_stored(config) else contextlib.nullcontext()
    with _quiet(), kept:  # its report of the weights is check_weights' matter
        model, found = load_part(
            "model",
            path,
            lambda: class_of(config).from_pretrained(
                path,
                revision=revision,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",
                use_safetensors=True,  # the other format is a pickle
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                # torch's grouped products, which are the default, are not for float64
                **({"experts_implementation": "eager"} if dtype == torch.float64 else {}),
                **how,
            ),
        )
    assert isinstance(model, PreTrainedModel)
    set_twin(model, load_part("model", path, lambda: twin_for(type(model), config)))
    if (twin := twin_of(model)) is not None and twin.is_own:  # other keys are the whole model's
        found["unexpected_keys"] = set(found["unexpected_keys"]) - twin.model.state_dict().keys()
    check_weights(path, found, vocabulary_of(config))
    return model


def load_part(what: str, path: str, load: Any) -> Any:
    """Return the result of `load`. Raises InputError, which names the part and the base model, and torch.OutOfMemoryError."""
    try:
        return load()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises many types for a model that is not there
        if isinstance(error, RuntimeError) and "out of memory" in str(error):  # of other devices and libraries
            raise torch.OutOfMemoryError(str(error)) from None
        kind = "folder" if os.path.isdir(path) else "hub id, or folder that does not exist"
        raise InputError(f"base_model {quoted(path, 300)} ({kind}): cannot load the {what}: {foreign(error)}") from None


def check_files(path: str) -> None:
    """Refuse a folder whose weights cannot be the expected ones. A hub id is transformers' to find."""
    if not os.path.isdir(path):
        return
    names = sorted(file.name for file in Path(path).iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise InputError(
            f"base_model {path!r}: the folder holds its weights only as {pickles[0]}, a pickle, which may run any code and is "
            "not opened; load it where you trust it, and save_pretrained it as model.safetensors"
        )
    raise InputError(f"base_model {path!r}: the folder holds no weights (model.safetensors)")


def vocabulary_of(config: Any) -> int | None:
    """Number of tokens in the vocabulary, according to a configuration."""
    found = getattr(config.get_text_config(), "vocab_size", None)
    return found if isinstance(found, int) else None


def check_weights(path: str, found: Mapping[str, Any], vocabulary: int | None = None) -> None:
    """Refuse weights that differ from those in the configuration: missing ones would be random.

    Args:
        found: transformers' report on loading; its mismatched_keys are (name, shape in the files, shape in the model).
        vocabulary: see vocabulary_of.
    """
    mismatched = list(found.get("mismatched_keys", ()))
    rows = {
        saved[0] if [*saved[1:]] == [*wanted[1:]] and wanted[0] == vocabulary else None
        for _, saved, wanted in mismatched
    }
    if len(rows) == 1 and (own := rows.pop()) is not None and own != vocabulary:
        raise InputError(
            f"base_model {path!r}: the weight files hold embeddings for {own} tokens, and config.json says vocab_size "
            f"{vocabulary}: the vocabulary was {'grown' if own > (vocabulary or 0) else 'cut'}; set it to {own}"
        )
    odd = {f"{name} is {list(saved)}, not {list(wanted)}" for name, saved, wanted in mismatched}
    unexpected = [name for name in found.get("unexpected_keys", ()) if not OLD_BUFFERS.search(name)]
    for prefix in WRAPPED:
        if unexpected and all(name.startswith(prefix) for name in unexpected):
            raise InputError(
                f"base_model {path!r}: the names in the files begin with {prefix!r}, as those of a model in a wrapper "
                "(torch.compile, data parallelism, PEFT); save_pretrained the model inside"
            )
    faults = [
        (found.get("missing_keys", ()), "lack {} of the model that config.json describes"),
        (unexpected, "hold {} that the model has no place for"),
        (odd, "hold {} of another shape than config.json says"),
    ]
    said = [f"{what.format(plural(len(keys), 'weight'))}: {_some(sorted(keys))}" for keys, what in faults if keys]
    if said:
        raise InputError(f"base_model {path!r}: the weight files {'; they '.join(said)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if names[LISTED:] else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect the output that libraries such as GPTQModel print while they load to standard error; standard output is the
    command's."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes that libraries of codes are told
            yield
    finally:
        transformers.utils.logging.set_verbosity(before)
