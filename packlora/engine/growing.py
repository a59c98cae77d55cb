"""A sample on its way: its tokens so far, its own generator, and what ends it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from packlora.engine.sampling import Reason, SampleRequest
from packlora.engine.text import StopStrings, TextStream
from packlora.seeding import stable_hash


def generator_of(seed: int, number: int) -> np.random.Generator:
    """The generator of sample `number` of a request."""
    return np.random.Generator(np.random.Philox(stable_hash("sample", seed, number)))


@dataclass(slots=True, eq=False)
class Growing:
    """A sample. generator: None at temperature 0. ids: its tokens so far. limit: most that it may have. slot: its place in a
    cache. uniform: the number from [0, 1) by which the next token is drawn; the likeliest one needs none."""

    ticket: int
    number: int
    request: SampleRequest
    limit: int
    generator: np.random.Generator | None
    text: TextStream | None
    stops: StopStrings
    ids: list[int] = field(default_factory=list)
    slot: int = -1
    uniform: float = field(init=False)

    def __post_init__(self) -> None:
        self._turn()

    @staticmethod
    def of(ticket: int, request: SampleRequest, room: int, tokenizer: object) -> list[Growing]:
        """All samples of a request. room: tokens that the context has left."""
        limit = min(room, request.max_tokens or room)
        return [
            Growing(
                ticket, number, request, limit, generator_of(request.seed, number) if request.temperature > 0 else None,
                TextStream(tokenizer) if request.stop_strings else None, StopStrings(request.stop_strings),
            )
            for number in range(request.num_samples)
        ]  # fmt: skip

    def _turn(self) -> None:
        """Make the number for the next token: one whose pass fails is drawn by it again."""
        self.uniform = 0.0 if self.generator is None else self.generator.random()

    def take(self, token: int, logprob: float) -> tuple[str, Reason | None]:
        """The text that becomes complete with a new token, and the reason if the sample ends with it."""
        self.ids.append(token)
        self._turn()
        text = "" if self.text is None else self.text.push(token)
        if not math.isfinite(logprob):
            return text, "not finite"
        if token in self.request.stop_tokens or (self.text is not None and self.stops.found(text)):
            return text, "stop"
        return text, "length" if len(self.ids) >= self.limit else None
