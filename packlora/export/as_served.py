"""Whether what was written for other programs gives there what the adapter gives here: the check of `merge` and `export`.

What was written is loaded as programs that serve build it: by transformers, into the class that the base model's folder names,
and into the one that is trained where that is another; an exported adapter by PEFT. Its logits of a few random tokens are held
against those of the adapter on the model that it was trained on, in float32.

Of a large model that takes minutes and much memory, so it is done there on request alone, and what was not compared is told.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from packlora.adapters.attach import attach
from packlora.adapters.reading import load_adapter
from packlora.base.classes import ClassOf, auto_class, own_class, served_class
from packlora.base.load import read_model
from packlora.base.shape import vocabulary
from packlora.commands.adapter_folder import AdapterFolder
from packlora.engine.memory import memory_room
from packlora.errors import InputError, foreign
from packlora.ops.twin import twin_of
from packlora.runtime.continued import resolve_folder

Load = Callable[[ClassOf], PreTrainedModel]
Check = Literal["auto", "always", "never"]
CHECKS: tuple[Check, ...] = ("auto", "always", "never")
PARAMETERS = 2e9
"""Parameters of the largest model that is compared by default: some 20 s on two cores."""
BYTES = 10
"""Bytes of memory that each parameter takes during the comparison."""
TOKENS = 24
CLOSE, ROUNDED = 1e-3, 8.0
"""Tolerance of logits, as a share of the adapter's contribution: in float32, and in multiples of the share that rounding is
known to lose."""
NOISE = {torch.float32: 2e-5, torch.float64: 1e-9}
"""Tolerance as a share of the logits themselves, by the dtype of the computation; COARSE for 16 bits."""
COARSE = 3e-2


@dataclass(frozen=True, slots=True)
class Trained:
    """Logits of the model that an adapter was trained on. logits: with the adapter, [T, V]; base: without it, [T, V]. dtype:
    dtype in which they were computed."""

    ids: torch.Tensor
    logits: torch.Tensor
    base: torch.Tensor
    dtype: torch.dtype


def why_not(check: str, opened: AdapterFolder) -> str | None:
    """Reason why an adapter is not compared; None where it is. An empty text where the user says so. Raises InputError for a
    check that is none."""
    if check not in CHECKS:
        raise InputError(f"--check {check!r} is not one of {', '.join(CHECKS)}")
    if check != "auto":
        return "" if check == "never" else None
    parameters = sum(one.numel() for one in opened.skeleton.parameters())
    if parameters > PARAMETERS:
        return f"the model has {parameters / 1e9:.1f} billion parameters"
    if parameters * BYTES > memory_room(torch.device("cpu")):
        return f"that takes {parameters * BYTES / 1e9:.1f} GB of memory, and less is free"
    return None


def not_compared(what: str, why: str | None) -> list[str]:
    """Note that the logits were not compared, if there is a reason."""
    if not why:
        return []
    return [f"the logits of {what} were not compared with the adapter's: {why}; --check always compares them"]


@torch.no_grad()
def as_trained(opened: AdapterFolder, load: Load) -> Trained:
    """Run an adapter's folder on its base model.

    Args:
        load: the base model, of the class that a function gives for its configuration.
    """
    twin = twin_of(opened.skeleton)
    whole = twin is not None and any(twin.there(path) is None for path in opened.spec.modules)
    model: Any = load(served_class if whole else auto_class).eval()
    name = opened.path.name
    attached, (adapter,) = attach(model, {name: resolve_folder(opened.path, model, name)}, 0)
    load_adapter(opened.path, adapter)
    ids = _some_tokens(opened.base_config, vocabulary(model)).to(model.device)
    base = _logits(model, ids)
    with attached.only(adapter.number):
        return Trained(ids, _logits(model, ids), base, model.dtype)


def compare(
    opened: AdapterFolder, load: Load, served: Mapping[str, Callable[[], Any]], what: str, lost: float = 0.0
) -> list[str]:
    """Hold what was written against an adapter.

    Args:
        load: see as_trained.
        served: loads what was written, by the name of what loads it.
        what: it is, for messages.
        lost: share of what the adapter adds that rounding is known to lose of weights.

    Returns:
        What should be said of it; also that the adapter does not run here, so that nothing was compared.

    Raises:
        InputError: what was written does not load, or gives other logits.
    """
    try:
        trained = as_trained(opened, load)
    except Exception as error:  # any code of a model; what was written is not wrong for it
        return not_compared(what, f"the adapter does not run here ({foreign(error)})")
    added = _size(trained.logits - trained.base)
    noise = NOISE.get(trained.dtype, COARSE) * _size(trained.logits)
    allowed = noise + (CLOSE + ROUNDED * lost) * added
    for name, load_served in served.items():
        try:
            with torch.no_grad():
                off = _size(_logits(load_served().to(trained.ids.device), trained.ids) - trained.logits)
        except InputError as error:
            raise InputError(f"{what} cannot be served: {error}. Nothing is written") from None
        gc.collect()
        if off <= allowed:
            continue
        if allowed > added / 2 and off < 2 * (added + allowed):
            return [
                f"whether the logits of {what} are the adapter's cannot be told: rounding changes them by about as much as the "
                "adapter adds"
            ]
        raise InputError(
            f"{what}, loaded as {name}, does not give the adapter's logits: they are off by {off / max(added, 1e-30):.1%} of "
            "what the adapter adds. Nothing is written; --check never writes it all the same"
        )
    return []


def classes(opened: AdapterFolder) -> dict[str, ClassOf]:
    """Names of the classes that are built of the base's folder, with what read_model builds them by."""
    twin = twin_of(opened.skeleton)
    own: dict[str, ClassOf] = {type(opened.skeleton).__name__: served_class}
    return own if twin is None else own | {type(twin.model).__name__: _other_class}


def _other_class(config: Any) -> Any:
    """The auto class that builds the second model of a folder that has a twin of its served class."""
    return auto_class(config) if own_class(config) is not None else AutoModelForCausalLM


def with_peft(base: str, revision: str | None, folder: Path, class_of: ClassOf) -> Any:
    """A base model with the adapter of a folder, by PEFT. Raises InputError where PEFT does not take all of it."""
    model = read_model(base, revision, torch.float32, class_of=class_of)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, folder)
    except Exception as error:  # PEFT raises many types
        raise InputError(f"PEFT does not load it into {type(model).__name__}: {foreign(error)}") from None


def _some_tokens(config: Any, words: int) -> torch.Tensor:
    """Random ids [1, T] that mark no image."""
    text = config.get_text_config()
    named = [part.to_dict() for part in (config, text)]
    marks = {
        value
        for own in named
        for key, value in own.items()
        if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    plain = torch.tensor([one for one in range(min(words, 50_000)) if one not in marks] or [0])
    length = min(TOKENS, int(getattr(text, "max_position_embeddings", None) or TOKENS))
    return plain[torch.randint(len(plain), (1, length), generator=torch.Generator().manual_seed(0))]


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits[0]
    return out.double().cpu()


def _size(logits: torch.Tensor) -> float:
    """Root mean square of the token in the middle: a router that decides otherwise changes some tokens."""
    return float(logits.square().mean(-1).sqrt().median())
