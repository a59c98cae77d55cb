"""Values of sampling: what is requested of an adapter, or of the base model, and what comes back token by token.

generate.py samples them by continuous batching, library_sampler.py by transformers' own generation. Both are a `Sampling`.

    ticket = sampler.submit(SampleRequest(prompt=ids, adapter=3, max_tokens=64, seed=1))
    while sampler.waiting:
        for token in sampler.step():
            ...                                   # token.ticket, token.sample, token.id, token.logprob, token.reason
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from packlora.engine.rows import NO_ADAPTER
from packlora.errors import InputError

Reason = Literal["stop", "length", "not finite"]
"""Why a sample ended: a stop token or string, its number of tokens, or logits that are NaN or infinite."""
COLDEST = 1e-30
"""Least temperature above 0: logits divided by a smaller one may be infinite in float32."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt to be continued once or several times.

    prompt: token ids, at least one.
    adapter: number of the adapter on the model; NO_ADAPTER samples the base model.
    max_tokens: most new tokens of each sample; None: as many as the context has room for.
    num_samples: samples of this prompt, which share its prefill.
    temperature: 0 takes the likeliest token each time.
    top_k: tokens are drawn from the k likeliest; 0 or less: from all.
    top_p: tokens are drawn from the fewest likeliest ones, after top_k, whose probabilities add up to p or more, 0 < p <= 1.
    seed: sample number i of a request draws by a generator of its own, which is made of (seed, i) alone.
    stop_tokens: token ids that end a sample. The one that does so is the sample's last token.
    stop_strings: texts that end a sample once its text has one; the tokens that it lies in are part of the sample.
    prompt_logprobs: whether log-probabilities of the prompt's tokens are requested.
    top_prompt, top_sampled: number of the likeliest tokens that are requested at each place of the prompt and of each sample.
    prompt_targets: int64 [P - 1, K]; row i names tokens whose log-probabilities at place i + 1 of a prompt of P tokens are
        requested; -1: none.
    entropy: whether the entropy of the distribution that each token is drawn from is requested.
    arguments: more of the model's keyword arguments, as those of images; for transformers' own generation alone.
    """

    prompt: tuple[int, ...]
    adapter: int = NO_ADAPTER
    max_tokens: int | None = None
    num_samples: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    top_prompt: int = 0
    top_sampled: int = 0
    prompt_targets: np.ndarray | None = None
    entropy: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores_prompt(self) -> bool:
        """Whether scores of the prompt are requested."""
        return self.prompt_logprobs or self.top_prompt > 0 or self.prompt_targets is not None


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest tokens, most likely first: ids int32 [n, k] and their log-probabilities float32 [n, k]."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a prompt of P tokens, of the model's own distribution (temperature 1). None where it was not requested.

    logprobs: float32 [P]; NaN for the first token. top: of places 1 to P - 1, so [P - 1, k]. targets: float32 [P - 1, K], NaN
    where no token was named.
    """

    logprobs: np.ndarray | None
    top: Likeliest | None
    targets: np.ndarray | None


class SampledToken(NamedTuple):
    """One new token of a sample.

    ticket, sample: of the request, and the number of the sample in it.
    id: the token.
    logprob: of the tempered distribution over all tokens, before top_k and top_p; at temperature 0 of the model's own.
    text: text that became complete with it, for requests with stop_strings; else empty.
    reason: why the sample ends with this token; None: it goes on.
    top: the likeliest tokens [1, k] of the same distribution, where requested.
    scores: of the prompt, with the first token of sample 0.
    entropy: of the same distribution as logprob, where requested.
    """

    ticket: int
    sample: int
    id: int
    logprob: float
    text: str = ""
    reason: Reason | None = None
    top: Likeliest | None = None
    scores: PromptScores | None = None
    entropy: float | None = None


class Sampling(Protocol):
    """Samples for the thread that owns the model: no other forward may run during `step`.

    Adapters may step, come and go between two calls of `step`; tokens that follow are drawn by the weights as they are then,
    after keys and values of earlier tokens that were made by the weights as they were.
    """

    @property
    def waiting(self) -> int:
        """Samples that have not ended."""

    def submit(self, request: SampleRequest) -> int:
        """Queue a request. Returns its ticket.

        Raises:
            InputError: the request cannot be served; names the field, what was found and what is accepted.
        """

    def cancel(self, ticket: int) -> None:
        """Forget a request, whether it waits, runs or has ended; its samples give no more tokens."""

    def forget(self, adapter: int) -> None:
        """Keep nothing of an adapter, which has left the model."""

    def step(self) -> list[SampledToken]:
        """Let waiting requests enter where there is room, and draw the next token of every sample that runs.

        Returns:
            The new tokens, in no order that means anything; empty only where nothing waits.

        Raises:
            torch.OutOfMemoryError: memory ran out; the requests that could not enter wait still.
        """

    def free(self) -> None:
        """Give the cache's memory back; samples that run are begun anew, and draw the same tokens."""


def check_request(request: SampleRequest, vocabulary: int, context: int, has_tokenizer: bool) -> int:
    """Tokens that the context leaves for a sample. Raises InputError, which names the field."""
    prompt, targets = request.prompt, request.prompt_targets
    room = context - len(prompt)
    found = [
        (not prompt, "prompt: it has no tokens; give at least one"),
        (
            any(not 0 <= token < vocabulary for token in prompt),
            f"prompt: a token is not one of the vocabulary, 0 to {vocabulary - 1}",
        ),
        (room < 1, f"prompt: it has {len(prompt)} tokens, the model's context {context}, of which one is the answer's"),
        (
            request.max_tokens is not None and request.max_tokens < 1,
            f"max_tokens: {request.max_tokens} is not 1 or more",
        ),
        (request.num_samples < 1, f"num_samples: {request.num_samples} is not 1 or more"),
        (
            not (request.temperature == 0 or COLDEST <= request.temperature < math.inf),
            f"temperature: {request.temperature} is neither 0 nor a number from {COLDEST} on",
        ),
        (not 0 < request.top_p <= 1, f"top_p: {request.top_p} is not above 0 and at most 1"),
        (any(not text for text in request.stop_strings), "stop_strings: a text is empty"),
        (bool(request.stop_strings) and not has_tokenizer, "stop_strings: there is no tokenizer for them"),
        (min(request.top_prompt, request.top_sampled) < 0, "top_prompt, top_sampled: must be 0 or more"),
        (
            targets is not None and (targets.ndim != 2 or len(targets) != len(prompt) - 1 or targets.dtype != np.int64),
            f"prompt_targets: must be int64 [{len(prompt) - 1}, K]",
        ),
        (
            targets is not None and targets.size > 0 and (targets.min() < -1 or targets.max() >= vocabulary),
            f"prompt_targets: a token is neither -1 nor one of the vocabulary, 0 to {vocabulary - 1}",
        ),
    ]
    for wrong, what in found:
        if wrong:
            raise InputError(what)
    return room
