"""Who owns the tokens that pass through a Megatron-Core model, also those that were sent to experts.

Tokens are counted as the hidden states lie, [s, b] in row-major order: for packed samples b is 1. Where tensor parallelism
splits tokens between the layers, owners are those of all tokens, on every process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.optim.optimizer import register_optimizer_step_post_hook

from packlora.adapters.linear import Attached, in_backward
from packlora.adapters.owners import TokenOwners
from packlora.errors import InputError
from packlora.plans.select import PlanChooser

_LIVE: weakref.WeakSet[Owned] = weakref.WeakSet()
GAMMA, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of SplitMix64, as signed words."""


class Owned(Attached):
    """State that the layers of one model share. A model with one adapter needs no owners: all tokens are that adapter's.

    only_one: its number, None for a model with several. drops: whether it has dropout. merged: adapter that is merged into the
    weights.
    """

    def __init__(self, chooser: PlanChooser, names: Sequence[str]) -> None:
        super().__init__([chooser], version_counted=False)  # Megatron's optimizers write behind the version counters
        self.names = tuple(names)
        self.only_one: int | None = 0 if len(names) == 1 else None
        self.drops = False
        self.merged: str | None = None
        self.training = True
        self._experts: dict[int, TokenOwners] | None = None
        self._in_backward = False
        """The owners that are active are those of a backward which `remember` has begun."""
        _LIVE.add(self)

    @contextmanager
    def active(self, owners: TokenOwners | int) -> Iterator[None]:
        if self._in_backward and not in_backward():  # left by a backward that has failed
            self._left()
        with super().active(owners):
            yield

    def remember(self, output: torch.Tensor) -> None:
        """The backward from a forward's output, which recomputes activations, has the owners of that forward, also where
        others' forwards have run since. It begins with the output's gradient."""
        owners = self._active
        if owners is None or not output.requires_grad:
            return

        def begin(gradient: torch.Tensor) -> None:
            if self._active is None:
                self._active, self._in_backward = owners, True
                torch.autograd.Variable._execution_engine.queue_callback(self._left)

        output.register_hook(begin)

    def _left(self) -> None:
        self._active, self._in_backward = None, False

    def owners(self, total: int, of_rows: bool = False, of_images: bool = False) -> TokenOwners | None:
        if self._active is not None or self.only_one is None:
            return super().owners(total, of_rows)
        return self._alone(total)

    def _alone(self, total: int) -> TokenOwners:
        """Owners of a model with one adapter: it has all tokens; dropout keys are drawn where it has dropout."""
        assert self.only_one is not None
        keys = drawn_keys(total, self.device) if self.drops and self.training else None
        return TokenOwners(total, ((self.only_one, 0, total),), keys)

    @property
    def device(self) -> torch.device:
        return self.choosers[0].device

    @property
    def travelling(self) -> TokenOwners | None:
        """Owners that go with the tokens to experts; None where all tokens are the same adapter's and keys are drawn there."""
        return self._active if isinstance(self._active, TokenOwners) else None

    @contextmanager
    def on_experts(self, owners: dict[int, TokenOwners]) -> Iterator[None]:
        """Run experts on tokens that were sent to them. owners: by the number of the expert among those of this process."""
        self._experts = owners
        try:
            yield
        finally:
            self._experts = None

    def of_expert(self, expert: int, total: int) -> TokenOwners | None:
        """Who owns the tokens of an expert of this process."""
        if self._experts is not None:
            return self._experts.get(expert)
        if isinstance(self._active, int):
            return TokenOwners(total, ((self._active, 0, total),)) if total else None
        if self._active is not None:
            raise RuntimeError("owners of tokens were not sent to the experts with them")
        if self.only_one is None:
            return None
        return self._alone(total) if total else None


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer has stepped: it may hold a copy, or a part, of what adapters have, which is written back next."""
    for owned in tuple(_LIVE):
        owned.norms.changed()


register_optimizer_step_post_hook(_after_step)


def drawn_keys(total: int, device: torch.device) -> torch.Tensor:
    """Dropout keys [total, 2] from one number of the generator that Megatron-Core keeps alike in a tensor parallel group, under
    sequence parallelism too, and whose state it brings back where activations are recomputed; the device's default one where it
    has none. One number whatever `total` is, so generators stay alike.
    """
    tracker, name = random.get_cuda_rng_tracker(), random.get_data_parallel_rng_tracker_name()
    with tracker.fork(name) if name in tracker.get_states() else nullcontext():
        number = torch.empty((), dtype=torch.int64, device=device).random_()
    z = number + torch.arange(1, total + 1, device=device) * GAMMA
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * MIX_2
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return z.view(torch.int32).reshape(total, 2)


def token_owners(
    names: Sequence[str], samples: Sequence[tuple[str | None, int]], keys_T2: torch.Tensor | None = None
) -> TokenOwners:
    """Owners of packed samples.

    Args:
        names: of the adapters, in the order of their numbers.
        samples: each one's adapter, or None for the base model alone, and its tokens, in the order in which they lie.
        keys_T2: dropout keys of all tokens, [T, 2] int32; None drops nothing.

    Raises:
        InputError: a sample's adapter is not on the model, or its number of tokens is none.
    """
    segments: list[tuple[int, int, int]] = []
    at = 0
    for name, count in samples:
        if name is not None and name not in names:
            raise InputError(f"a sample is of the adapter {name!r}; the model has {', '.join(map(repr, names))}")
        if count < 0:
            raise InputError(f"a sample has {count} tokens; give the number of tokens of each sample, in their order")
        if name is not None and count:
            number = names.index(name)
            if segments and segments[-1][0] == number and segments[-1][2] == at:
                segments[-1] = (number, segments[-1][1], at + count)
            else:
                segments.append((number, at, at + count))
        at += count
    return TokenOwners(at, tuple(segments), keys_T2)
