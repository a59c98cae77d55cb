"""Modules that are trained beside low-rank adapters: modules_to_save and trainable_token_indices, which PEFT compares with the
ends of paths."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.kinds import Kind, why_no_rows
from packlora.errors import InputError, quoted
from packlora.lora_config import LoraConfig


def other_modules(
    peft: LoraConfig, model: PreTrainedModel, job: str, twins: Collection[str] = ()
) -> dict[str, tuple[Kind, tuple[int, ...]]]:
    """Kind of each module by path, and the tokens of those of which rows are trained.

    Args:
        job: for messages.
        twins: see spec.resolve.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, tuple[Kind, tuple[int, ...]]] = {}
    for name in peft.modules_to_save or ():
        paths = [path for path in modules if path.endswith(name)]
        if not paths and not any(path.endswith(name) for path in twins):
            raise InputError(
                f"job {job!r}: modules_to_save names {quoted(name, 300)}, which matches nothing in the model"
            )
        for path in paths:
            try:
                copied(modules[path])
            except ValueError as error:
                raise InputError(
                    f"job {job!r}: modules_to_save matches {path}, {error}; taken are linear layers, embeddings and norms"
                ) from None
            found[path] = "copy", ()
    if not peft.trainable_token_indices:
        return found
    for path, tokens in _token_rows(peft, model, modules, job).items():
        if path in found:
            raise InputError(
                f"job {job!r}: {path} is in modules_to_save and has trainable_token_indices; give one of them"
            )
        found[path] = "tokens" if tokens else "tied", tokens
    return found


def _token_rows(
    peft: LoraConfig, model: PreTrainedModel, modules: dict[str, torch.nn.Module], job: str
) -> dict[str, tuple[int, ...]]:
    """Tokens by path whose rows are trained; none for an output layer that has those of the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs = next(path for path, module in modules.items() if module is embedding)
    outputs = next((path for path, module in modules.items() if module is head), None)
    asked: Any = peft.trainable_token_indices
    asked = asked if isinstance(asked, dict) else {inputs.rpartition(".")[2]: asked}
    rows: dict[str, tuple[int, ...]] = {}
    for name, tokens in asked.items():
        paths = [path for path in modules if path.endswith(name)]
        if not paths:
            raise InputError(
                f"job {job!r}: trainable_token_indices names {quoted(name, 300)}, which matches nothing in the model"
            )
        for path in paths:
            module: Any = modules[path]
            plain = type(module) is torch.nn.Linear and module.bias is None
            if not plain and (not isinstance(module, torch.nn.Embedding) or why_no_rows(module)):
                raise InputError(
                    f"job {job!r}: trainable_token_indices matches {path}, of type {type(module).__name__}; taken are "
                    "embeddings and output layers without a bias"
                )
            most = module.weight.shape[0]
            if wrong := [token for token in tokens if not 0 <= token < most]:
                raise InputError(
                    f"job {job!r}: trainable_token_indices has {wrong[0]}, and {path} has rows for tokens 0 to {most - 1}"
                )
            rows[path] = tuple(tokens)
    tied = getattr(model.config, "tie_word_embeddings", False) and outputs is not None and inputs in rows
    if tied and rows.get(outputs or "", rows[inputs]) == rows[inputs]:
        assert outputs is not None
        if getattr(head, "bias", None) is not None:
            raise InputError(
                f"job {job!r}: trainable_token_indices: {outputs}, tied to {inputs}, has a bias; that is not taken"
            )
        rows[outputs] = ()
    return rows


def trained_twice(path: str, kind: Kind, is_target: bool, job: str) -> InputError:
    """The error on a module that is one of other_modules and is trained in another way too.

    Args:
        kind: that other_modules gives.
        is_target: the other way is a low-rank adapter; else bias: all.
    """
    first = "target_modules" if is_target else "bias: all"
    second = "modules_to_save" if kind == "copy" else "trainable_token_indices"
    why = ", since it is tied to the embedding" if kind == "tied" else ""
    return InputError(
        f"job {job!r}: {path} is to be trained in two ways, by {first} and by {second}{why}; leave one of them out"
    )


def copied(module: torch.nn.Module) -> dict[str, str]:
    """Parameters of a module that a job may have a copy of: the module's names by those of the adapter, `norm` for the weight
    of a norm.

    Raises:
        ValueError: with the reason in words, where the module is none that treats every token by itself.
    """
    own = dict(module.named_parameters(recurse=False))
    leaf = not list(module.children())
    if isinstance(module, torch.nn.Embedding) and (reason := why_no_rows(module)):
        raise ValueError(reason)
    if leaf and own and (type(module) is torch.nn.Linear or isinstance(module, torch.nn.Embedding)):
        return {name: name for name in own}
    is_norm = isinstance(module, torch.nn.LayerNorm) or type(module).__name__.endswith("Norm")
    if leaf and is_norm and own.keys() <= {"weight", "bias"} and all(one.ndim == 1 for one in own.values()) and own:
        return {{"weight": "norm"}.get(name, name): name for name in own}
    raise ValueError(f"a module of type {type(module).__name__}")
