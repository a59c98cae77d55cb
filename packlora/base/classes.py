"""Choice of the transformers class that builds the model of a folder.

The class that is trained is mostly the one that the folder names (`architectures` in config.json). For some multimodal models
transformers has a text model as well. Where loading the text model would silently leave out the vision tower of the files, as
for Qwen3.5, the text model is trained; otherwise the whole model is (Llama 4). Inference servers build the class that the
folder names, and find modules by its names; AutoModelForCausalLM builds the text model. Such a pair is a Twin.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from packlora.ops.twin import Twin

ClassOf = Callable[[Any], Any]
"""Function from a configuration to the class, or the auto class, that is built from it."""
GENERATE = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)  # fmt: skip
"""Mappings from a model type to the names of its classes that generate text."""


def auto_class(config: Any) -> Any:
    """Auto class whose model is trained: the text class, where it can read the files and leaves out the weights for images
    (Qwen3.5), or where the files were saved by it; else the class that was saved (Llama 4)."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    text, whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    leaves_out = getattr(text, "_keys_to_ignore_on_load_unexpected", None)
    if whole.__name__ not in (config.architectures or ()) or text is whole:
        return AutoModelForCausalLM
    return AutoModelForCausalLM if leaves_out and _reads(text, whole, config) else AutoModelForImageTextToText


def own_class(config: Any) -> Any:
    """The class that a folder names as its architecture, where another one is trained; None where it is the same, or where
    transformers has no class of that name that generates text."""
    trained = _trained_class(config)
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    if trained is None or named in (None, trained.__name__) or _config_for(trained, config) is None:
        return None
    known = any(named in (one if isinstance(one, tuple) else (one,)) for names in GENERATE for one in names.values())
    own = getattr(transformers, named, None) if known else None
    return None if own is None or _config_for(own, config) is None else own


def served_class(config: Any) -> Any:
    """Class, or its auto class, that programs build which go by the architecture that a folder names."""
    return own_class(config) or auto_class(config)


def unknown_architecture(config: Any) -> str | None:
    """Name of the folder's architecture where it is no transformers class that generates text; inference servers may build it
    with other names. None otherwise."""
    trained = _trained_class(config)
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    known = named is None or trained is None or named == trained.__name__ or own_class(config) is not None
    return None if known else str(named)


def without_weights(cls: Any, config: Any) -> PreTrainedModel:
    """The model of a class on the meta device, with the whole configuration of a folder, or with its part for texts."""
    with torch.device("meta"):
        model: PreTrainedModel = cls._from_config(copy.deepcopy(_config_for(cls, config)), attn_implementation="eager")
    return model


def twin_for(cls: Any, config: Any) -> Twin | None:
    """The other class of a base model, for one of its two classes; None where there is one class."""
    trained = _trained_class(config)
    own = own_class(config) or trained
    text = trained if own is not trained else _text_class(own, config)
    if text is None:
        return None

    def build() -> tuple[PreTrainedModel, dict[str, str]]:
        inner, outer, names = _pair(text, own, config)
        return (inner, {theirs: name for name, theirs in names.items()}) if cls is own else (outer, names)

    return Twin(build, is_own=cls is not own, is_trained=trained is (text if cls is own else own))


def _text_class(whole: Any, config: Any) -> Any:
    """The text model that AutoModelForCausalLM builds of the folder of a whole one that is trained, if there is one."""
    text = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text in (None, whole) or whole is not MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None):
        return None
    return text if _reads(text, whole, config) else None


def _trained_class(config: Any) -> Any:
    return auto_class(config)._model_mapping.get(type(config), None)


def _pair(text: Any, whole: Any, config: Any) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, str]]:
    """Both models without weights, and the whole model's names by the text model's: the text class renames the whole model's
    names as it renames those in the folder's files."""
    return _cached_pair(text, whole, _Known(config))


class _Known:
    """A configuration that is compared by what it says."""

    def __init__(self, config: Any) -> None:
        self.config, self._said = config, (type(config), config.to_json_string(use_diff=False))

    def __hash__(self) -> int:
        return hash(self._said)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self._said == other._said


@functools.lru_cache(maxsize=2)
def _cached_pair(text: Any, whole: Any, known: _Known) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, str]]:
    inner, outer = (without_weights(cls, known.config) for cls in (text, whole))
    from packlora.renaming import renamed

    return inner, outer, renamed(inner, inner.state_dict(), outer.state_dict())[0]


def _reads(text: Any, whole: Any, config: Any) -> bool:
    """Whether a text class finds all its weights in files of the whole one."""
    inner, _, names = _pair(text, whole, config)
    return not inner.state_dict().keys() - names.keys()


def _config_for(cls: Any, config: Any) -> Any:
    """The configuration of a folder, or its part for texts, as a class takes it; None where it takes neither."""
    return next((one for one in (config, config.get_text_config()) if isinstance(one, cls.config_class)), None)
