"""Names of weights in files, and the names that a model has for them, as transformers' loading finds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key


def renamed(
    model: PreTrainedModel, wanted: dict[str, Any], keys: Iterable[str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Sort the keys of files by the names that a model gives them.

    Args:
        wanted: the model's state_dict.

    Returns:
        Keys by the model's names; names that it has no place for; and those that it computes of several keys.
    """
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    found: dict[str, str] = {}
    unexpected, computed, prefix = [], [], model.base_model_prefix
    for key in sorted(keys, key=dot_natural_key):
        name, converted = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, converted = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unexpected.append(name)
        elif converted is not None:
            computed.append(name)
        else:
            found[name] = key
    return found, unexpected, computed
