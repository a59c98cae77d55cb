"""The weights of a base model in its safetensors files, read row by row: for a model that no process holds whole.

Which weight of the files is which of the model is transformers' to say: names that it knows by others, tied weights, weights
that it leaves out. What it computes while it loads (experts that are put together, split projections) is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import cached_file

from packlora.base.held import INDEX, SINGLE
from packlora.base.load import check_files, check_weights, load_part, vocabulary_of
from packlora.base.mxfp4 import BLOCKS, SCALES, floats_of, packed_names
from packlora.errors import InputError
from packlora.renaming import renamed


class WeightFiles:
    """The weights in the files of a folder or a hub id. Each read opens its file anew: what is mapped into memory is then no
    more than what is read.

    Raises:
        InputError: there are no such files, or they cannot be read.
    """

    def __init__(self, path: str, revision: str | None) -> None:
        check_files(path)
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.bytes_read = 0
        self._files: dict[str, str] = {}
        self._joined: dict[str, list[list[str]]] = {}
        """Keys of the experts' weights by the name of the parameter that joins them, where the files have them one by one; see
        parts_of."""
        self._packed: dict[str, str] = {}
        """File of the scales, by the name of a weight in codes (mxfp4.py)."""
        for file in load_part("model", path, lambda: _files(path, revision)):
            with load_part("model", path, lambda file=file: safe_open(file, framework="pt")) as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no mapping
                    self._files[key] = file
                    self.shapes[key] = tuple(opened.get_slice(key).get_shape())
        for name in packed_names(self.shapes):  # is read as floats under its own name
            *_, N, G, _ = self.shapes.pop(name + BLOCKS)
            E = self.shapes.pop(name + SCALES)[0]
            self.shapes[name], self._packed[name] = (E, 32 * G, N), self._files.pop(name + SCALES)
            self._files[name] = self._files.pop(name + BLOCKS)

    @property
    def names(self) -> dict[str, list[str]]:
        """The keys in each file, by its name."""
        out: dict[str, list[str]] = {}
        for key, file in self._files.items():
            out.setdefault(Path(file).name, []).append(key)
        return out

    @property
    def paths(self) -> list[str]:
        """The files, by their names."""
        return sorted(set(self._files.values()), key=lambda file: Path(file).name)

    def read(self, key: str, *part: slice) -> torch.Tensor:
        """A weight, or a part of it, in the dtype of the file. It may be the file itself, mapped into memory: copy it.

        Args:
            part: of each dimension that is not whole, from the first one on; of a joined weight of the experts alone.
        """
        if key in self._packed:
            codes = self._read(self._files[key], key + BLOCKS, *part[:1])
            whole = floats_of(codes, self._read(self._packed[key], key + SCALES, *part[:1]))
            return whole[(slice(None), *part[1:])]
        if key in self._joined:
            parts, (experts,) = self._joined[key], part or (slice(None),)
            own = [
                torch.cat([self.read(one) for one in each])
                for each in zip(*(keys[experts] for keys in parts), strict=True)
            ]
            return torch.stack(own) if own else torch.empty(0, *self.shapes[key][1:])
        return self._read(self._files[key], key, *part)

    def _read(self, file: str, key: str, *part: slice) -> torch.Tensor:
        with safe_open(file, framework="pt") as opened:
            read: torch.Tensor = opened.get_slice(key)[part] if part else opened.get_tensor(key)
        self.bytes_read += read.numel() * read.element_size()
        return read

    def join(self, name: str, parts: list[list[str]], shape: tuple[int, ...]) -> None:
        """Register a weight [E, N, K] of all experts, so that it can be read under its name.

        Args:
            parts: see parts_of.

        Raises:
            InputError: they do not make up the shape.
        """
        found = [[self.shapes[key] for key in keys] for keys in parts]
        rows = {sum(sizes[0] for sizes in of_expert) for of_expert in zip(*found, strict=False)}
        columns = {sizes[1:] for own in found for sizes in own}
        if {*map(len, parts)} != {shape[0]} or rows != {shape[1]} or columns != {shape[2:]}:
            counts = ", ".join(str(len(keys)) for keys in parts)
            raise InputError(
                f"base_model {self.path!r}: the weight files hold experts that do not make up {name} {list(shape)}: of each "
                f"part {counts}, the first {list(found[0][0])}"
            )
        self._joined[name], self.shapes[name] = parts, shape


def _files(path: str, revision: str | None) -> list[str]:
    def find(name: str) -> str | None:
        found: str | None = cached_file(
            path, name, revision=revision, _raise_exceptions_for_missing_entries=name not in (SINGLE, INDEX)
        )
        return found

    if (single := find(SINGLE)) is not None:
        return [single]
    index = find(INDEX)
    if index is None:
        raise OSError(f"neither {SINGLE} nor {INDEX} is there")
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [file for name in names if (file := find(name)) is not None]


def keys_of(model: PreTrainedModel, files: WeightFiles) -> dict[str, str]:
    """Key of the files for each parameter or persistent buffer of a model, by its name. At least one of several tied parameters
    has a key. A weight of all experts may be joined from the files' weights of single experts.

    Args:
        model: its weights on any device; those that it ties are tied.

    Raises:
        InputError: the weights are not those that the model has; or others than experts are computed from those in the files.
    """
    keys, wanted = keys_there(model, files), model.state_dict()
    for name, parts in parts_of(model, files).items():
        if name not in keys:
            files.join(name, parts, tuple(wanted[name].shape))
            keys[name] = name
    there = {id(parameter) for name, parameter in _parameters(model) if name in keys}
    computed = [name for name, parameter in _parameters(model) if id(parameter) not in there]
    if computed:
        raise _computed(files, model, computed[0])
    return keys


def keys_there(model: PreTrainedModel, files: WeightFiles) -> dict[str, str]:
    """Keys as in keys_of, without the weights that are computed from weights in the files.

    Raises:
        InputError: the weights are not those that the model has.
    """
    extra = [*getattr(type(model.config), "extra_files", ()), getattr(model.config, "transformers_weights", None)]
    if any(extra):
        raise InputError(
            f"base_model {files.path!r}: weights are read out of safetensors files of the usual names here, not out of "
            f"{extra[0] or extra[-1]}"
        )
    wanted = model.state_dict()
    found, unexpected, made = renamed(model, wanted, files.shapes)
    there = {id(parameter) for name, parameter in _parameters(model) if name in found}
    tied = {name for name, parameter in _parameters(model) if id(parameter) in there}
    names, missing = {name for name, _ in _parameters(model)}, wanted.keys() - found.keys() - tied - set(made)
    check_weights(
        files.path,
        {
            # also those that transformers would leave at random values
            "missing_keys": (missing & names) | {*_without(missing - names, model._keys_to_ignore_on_load_missing)},
            "unexpected_keys": _without(unexpected, model._keys_to_ignore_on_load_unexpected),
            "mismatched_keys": [
                (name, files.shapes[key], tuple(wanted[name].shape))
                for name, key in found.items() if files.shapes[key] != tuple(wanted[name].shape)
            ],
        },
        vocabulary_of(model.config),
    )  # fmt: skip
    return found


def _computed(files: WeightFiles, model: PreTrainedModel, name: str) -> InputError:
    return InputError(
        f"base_model {files.path!r}: the weights of a model in parts are read as they lie in the files, but {name} of a "
        f"{model.config.model_type} model is computed from others; save_pretrained it with save_original_format=False"
    )


def parts_of(model: PreTrainedModel, files: WeightFiles) -> dict[str, list[list[str]]]:
    """Keys of the files that each parameter [E, N, K] of all experts is joined from, by its name, where the files have each
    expert separately: in order, the parts of the rows of one expert, each a list of keys by expert."""
    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    patterns = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, dict[str, list[str]]] = {}
    for key in sorted(files.shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if pattern is None or name not in wanted:
            continue
        made = [type(one) for one in patterns[pattern].operations]
        if made in ([MergeModulelist], [MergeModulelist, Concatenate]):
            own = found.setdefault(name, {one: [] for one in patterns[pattern].source_patterns})
            own[pattern].append(key)
    return {name: list(own.values()) for name, own in found.items()}


def turned_keys(model: PreTrainedModel, files: WeightFiles) -> dict[str, tuple[str, bool]]:
    """Key of each parameter [E, N, K] of all experts that files may hold as [E, K, N] (Qwen3-VL-MoE), by its name, and whether
    they do. transformers takes a weight of the model's own shape as it is."""
    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    turning = [entry for entry in mapping if isinstance(entry, WeightConverter) and _only_turns(entry)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    found: dict[str, tuple[str, bool]] = {}
    for key, shape in files.shapes.items():
        name, pattern = rename_source_key(key, renamings, turning, model.base_model_prefix, wanted)
        if pattern is not None and name in wanted:
            found[name] = key, tuple(wanted[name].shape) != shape
    return found


def _only_turns(entry: WeightConverter) -> bool:
    """Whether transformers changes a tensor of the files only where it lies transposed, and then transposes each expert's."""
    (operation, *others) = entry.operations
    turns = isinstance(operation, Transpose) and operation.check_dims and {operation.dim0, operation.dim1} == {1, 2}
    return bool(turns and not others)


def _parameters(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _without(names: Iterable[str], ignored: Iterable[str] | None) -> list[str]:
    """Names that match none of these patterns."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored or ())]
