"""Samples of the OpenAI-style endpoint on another rank: requests and tokens as values of messages.

Nothing of them is in the journal. The rank sends the tokens of a pass in one message, and rank 0 hands them to who waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from packlora.engine.sampling import Likeliest, PromptScores, Reason, SampledToken, SampleRequest
from packlora.serve.errors import Failed
from packlora.serve.ranks.channel import Channel, array_from, array_values
from packlora.serve.samplers import Source

OWN = ("adapter", "prompt_targets", "arguments")
"""Fields of a request that are not sent: the first is the rank's own, the others are not asked for by the endpoint."""


def request_values(request: SampleRequest) -> dict[str, Any]:
    """A request as values of a message."""
    found = {own.name: getattr(request, own.name) for own in fields(request) if own.name not in OWN}
    return found | {"stop_tokens": sorted(request.stop_tokens)}


def request_from(values: dict[str, Any]) -> SampleRequest:
    """The request of `request_values`."""
    lists = {"prompt": tuple, "stop_strings": tuple, "stop_tokens": frozenset}
    return SampleRequest(**values | {name: make(values[name]) for name, make in lists.items()})


def token_values(token: SampledToken) -> list[Any]:
    """A token as values of a message."""
    scores = token.scores
    own = None if scores is None or scores.logprobs is None else array_values(scores.logprobs)
    shown = None if scores is None else [own, _likeliest(scores.top)]
    return [token.sample, token.id, token.logprob, token.text, token.reason, _likeliest(token.top), shown]


def token_from(values: Sequence[Any]) -> SampledToken:
    """The token of `token_values`, of no ticket."""
    sample, id, logprob, text, reason, top, shown = values
    scores = None
    if shown is not None:
        logprobs = None if shown[0] is None else array_from(shown[0])
        scores = PromptScores(logprobs, _from_likeliest(shown[1]), None)
    return SampledToken(0, sample, id, logprob, text, cast(Reason | None, reason), _from_likeliest(top), scores)


def _likeliest(top: Likeliest | None) -> list[Any] | None:
    return None if top is None else [array_values(top.ids), array_values(top.logprobs)]


def _from_likeliest(values: Sequence[Any] | None) -> Likeliest | None:
    return None if values is None else Likeliest(*map(array_from, values))


class Streamed:
    """A request of rank 0 among the samples that run on another rank; see samplers.Running.

    Args:
        outbox: where its tokens are put, with its key, to be sent after the pass.
    """

    def __init__(
        self, channel: Channel, key: int, owner: str, source: Source, samples: int, outbox: list[list[Any]]
    ) -> None:  # fmt: skip
        self.channel, self.key, self.owner, self.source, self.left, self.outbox = (
            channel,
            key,
            owner,
            source,
            samples,
            outbox,
        )

    def take(self, token: SampledToken) -> bool:
        """See Running."""
        self.outbox.append([self.key, *token_values(token)])
        self.left -= token.reason is not None
        return not self.left

    def fail(self, why: Failed) -> None:
        """See Running."""
        self.channel.send("refuse", key=self.key, text=why.text, category=why.category)
