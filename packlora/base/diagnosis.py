"""Diagnosis of a base model that the proof has refused: the module in which packing goes wrong, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.errors import Unpackable

FIRST_PLACES = range(1, 4)
"""First position ids of families that do not begin at 0: they begin after the number of a padding token."""
Logits = Callable[[torch.Tensor], torch.Tensor]


def reason_of(model: PreTrainedModel, error: Exception, by_itself: str = "") -> str:
    """Reason why a forward failed, in words. by_itself: what failed where nothing was packed."""
    if isinstance(error, Unpackable):
        return f"cannot be packed: {error}"
    first_line = (str(error).strip() or "no reason given").split("\n")[0]
    found = f"{type(error).__name__}: {first_line}"
    path, module = _innermost(model, error)
    where = path and f"{path} ({type(module).__name__})"
    if by_itself:
        return f"{by_itself}: {found}{where and f', in {where}'}; look into its config.json"
    if isinstance(error, IndexError) and isinstance(module, torch.nn.Embedding):  # of places that it counts itself
        return (
            f"cannot be packed: {where} has {module.num_embeddings} rows, too few for the places of a packed row, which it "
            "counts from the row's begin"
        )
    return f"cannot be packed: {where or 'it'} does not run on a packed row, which has no attention mask ({found})"


def _innermost(model: PreTrainedModel, error: Exception) -> tuple[str, torch.nn.Module | None]:
    """The innermost module whose forward an error left, with its path; "" and None where there is none but the model."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    frame, found = error.__traceback__, ("", None)
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if path := paths.get(id(module), ""):
            found = path, module
        frame = frame.tb_next
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """Inputs and outputs of a module for some last tokens, where these are [1, T, width]."""

    path: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@torch.no_grad()
def where_samples_meet(model: PreTrainedModel, runs: tuple[Callable[[], Any], Callable[[], Any]], n: int) -> str:
    """The first module whose outputs for the last n tokens are others in the second run, with the same inputs for them, by path
    and class; "" where none can be named. runs: of packs that agree in the last n tokens."""
    for first, second in zip(*(_watched(model, run, n) for run in runs), strict=False):
        if first.path != second.path:
            return ""
        if first.inputs and _equal(first.inputs, second.inputs) and not _equal(first.outputs, second.outputs):
            return f" in {first.path} ({type(model.get_submodule(first.path)).__name__})"
    return ""


def _watched(model: PreTrainedModel, run: Callable[[], Any], n: int) -> list[_Seen]:
    """Inputs and outputs of all modules but the model, in the order in which their forwards ended."""
    found: list[_Seen] = []
    begun: list[list[torch.Tensor]] = []

    def rows(tensors: Iterable[Any]) -> list[torch.Tensor]:
        kept = [one for one in tensors if isinstance(one, torch.Tensor) and one.ndim == 3 and one.shape[1] > n]
        return [one[0, -n:].clone() for one in kept]

    def begin(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        begun.append(rows([*args, *kwargs.values()]))  # before the module may write into them

    def end(path: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        found.append(_Seen(path, begun.pop(), rows(output if isinstance(output, tuple) else (output,))))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path:
                hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(end, path)))
        run()
    return found


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b) for a, b in zip(one, other, strict=True)
    )


@torch.no_grad()
def of_places(packed: Logits, n: int, is_own: Callable[[torch.Tensor], bool]) -> str | None:
    """Describe how the model misuses the position ids of a sample; None where no error is found.

    Args:
        packed: logits of one sample of n tokens, whose places are given.
        is_own: whether these are the logits that transformers gives for the sample.
    """
    places = torch.arange(n)
    first = packed(places)
    if is_own(first):
        if torch.equal(first, packed(2 * places)):
            return "it takes no notice of position_ids, and counts a sample's places from the begin of the packed row"
        return None
    for start in FIRST_PLACES:
        if is_own(packed(start + places)):
            return f"it counts the places of a sample from {start} on, where packed samples begin at 0"
    return None
