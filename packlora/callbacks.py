"""ThroughputCallback: tokens per second and peak memory in the logs of a Hugging Face Trainer.

    Trainer(..., callbacks=[packlora.events.ThroughputCallback()])

Works with any Trainer (TRL's too), accelerated model or not, so that the two can be compared. The module has the names of
`packlora.events` too, whose older name it is.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback

from packlora import events
from packlora.portable import peak_resident


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(events, name):
        return getattr(events, name)
    raise AttributeError(f"module 'packlora.callbacks' has no attribute {name!r}")


class ThroughputCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that adds speed and memory to every training log, and to state.log_history.

    tokens_per_second: tokens that the model of this process was trained on since the last log, padding not counted (by the
        attention mask, where there is one), by the time from the first step since then; evaluation and saving not counted. Of
        forwards without gradients, such as those of a reference, the time is counted and the tokens are not.
    peak_memory_gib: the most that tensors on this process's GPU have taken so far, in GiB (2**30 bytes); without a GPU, the
        process's peak resident set.

    It takes no arguments. The Trainer calls its methods; between two logs nothing waits for the device.
    """

    def __init__(self) -> None:
        self._tokens: int | torch.Tensor = 0
        self._since: float | None = None
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Count the tokens of every forward of `model` from here on."""
        self._tokens, self._since = 0, None
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock at the first step after a log."""
        if self._since is None:
            self._tokens, self._since = 0, time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the two figures to a training log, a dict; other logs are left as they are."""
        if logs is None or "loss" not in logs or self._since is None:  # an evaluation, or the summary at the end
            return
        tokens = int(self._tokens)  # waits for the device
        figures = {
            "tokens_per_second": round(tokens / (time.perf_counter() - self._since), 1),
            "peak_memory_gib": round(_peak_bytes() / 2**30, 3),
        }
        self._since = None
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # the Trainer has copied the logs there already

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):  # a reference may be computed in train mode
            return
        mask, ids, embeddings = (kwargs.get(name) for name in ("attention_mask", "input_ids", "inputs_embeds"))
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self._tokens = self._tokens + mask.detach().sum()
        elif isinstance(ids, torch.Tensor):
            self._tokens = self._tokens + ids.numel()
        elif isinstance(embeddings, torch.Tensor):
            self._tokens = self._tokens + embeddings.shape[:-1].numel()


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_resident()
