"""Sampling by continuous batching: prompts and samples of many adapters in one pass over one frozen model.

A queue of requests, the samples that run, and what becomes of each new token. decode.py runs the model, draw.py draws,
base/kv_cache.py holds keys and values; library_sampler.py serves models whose cache is another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from packlora.adapters.linear import Attached
from packlora.base.cached_proof import why_not_cached
from packlora.base.shape import context_of, vocabulary
from packlora.engine.decode import BothPasses, NextToken, Passes, Prompt
from packlora.engine.draw import draw, prompt_scores
from packlora.engine.growing import Growing
from packlora.engine.library_sampler import LibrarySampler, settings_that_change
from packlora.engine.recorded_decode import GraphedPasses, why_no_decode_graphs
from packlora.engine.sampling import PromptScores, SampledToken, SampleRequest, Sampling, check_request

PREFILL_TOKENS = 2048
"""Most tokens of prompts that are prefilled in one pass, where there are several: samples that run wait for it."""
PREFILL_ALONE = 8192
"""The same where no sample runs and memory has not run out. Prompts that are scored stay with fewer, since each of their tokens
has logits."""
LEAST_LENGTH = 64
"""Fewest places of a slot; longer ones are powers of two."""
FEWEST_ROWS = 32
"""Rows of a pass at least."""


@dataclass(slots=True)
class _Entry:
    """Samples that wait for a common prefill of these tokens. is_first: nothing of the request was prefilled before."""

    request: SampleRequest
    ids: Sequence[int]
    samples: list[Growing]
    is_first: bool

    @property
    def length(self) -> int:
        """Places that a sample needs at most."""
        return len(self.request.prompt) + self.samples[0].limit

    @property
    def scored(self) -> bool:
        return self.is_first and self.request.scores_prompt


def _next_token(sample: Growing) -> NextToken:
    place = len(sample.request.prompt) + len(sample.ids) - 1
    return NextToken(sample.ids[-1], sample.request.adapter, sample.slot, place)


class Sampler:
    """Sampling of a model that runs packed rows (base/packing.py), with the adapters that are on it.

    Args:
        model: on its device, made ready by prepare_model.
        attached: state that its adapted layers share.
        tokenizer: for stop strings; None refuses these.
        rows: most samples that run at once.
        cache_tokens: most tokens that the cache of keys and values has room for.
        context: most tokens of a prompt with its answer; None: the model's.
        fewest_rows: rows of a pass at least. With fewer, a sample's bits on a CPU depend on how many run beside it.
        graphs: record decode passes as CUDA graphs, where they can be.
        passes: who runs the passes; None: this process alone.
    """

    def __init__(
        self, model: PreTrainedModel, attached: Attached, tokenizer: Any = None, *, rows: int = 64,
        cache_tokens: int = 65536, context: int | None = None, fewest_rows: int = FEWEST_ROWS,
        graphs: bool = True, passes: BothPasses | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.rows, self.cache_tokens = tokenizer, rows, cache_tokens
        self.context = min(context or context_of(model.config), cache_tokens)
        self.vocabulary = vocabulary(model)
        self._passes: BothPasses = passes or Passes(model, attached, fewest_rows)
        if graphs and isinstance(self._passes, Passes) and why_no_decode_graphs(model, attached) is None:
            self._passes = GraphedPasses(self._passes)
        self._queue: deque[_Entry] = deque()
        self._running: list[Growing] = []
        self._out: list[SampledToken] = []
        """Tokens that were drawn and not handed out yet."""
        self._tickets, self._alone = 0, PREFILL_ALONE

    @property
    def waiting(self) -> int:
        """See Sampling."""
        return sum(len(entry.samples) for entry in self._queue) + len(self._running) + bool(self._out)

    def submit(self, request: SampleRequest) -> int:
        """See Sampling."""
        room = check_request(request, self.vocabulary, self.context, self.tokenizer is not None)
        if request.arguments:
            raise ValueError("arguments of the model are for transformers' own generation alone")
        ticket, self._tickets = self._tickets, self._tickets + 1
        samples = Growing.of(ticket, request, room, self.tokenizer)
        self._queue.append(_Entry(request, request.prompt, samples, True))
        return ticket

    def cancel(self, ticket: int) -> None:
        """See Sampling."""
        self._running = [sample for sample in self._running if sample.ticket != ticket]
        self._out = [token for token in self._out if token.ticket != ticket]
        self._queue = deque(entry for entry in self._queue if entry.samples[0].ticket != ticket)

    def forget(self, adapter: int) -> None:
        """See Sampling."""
        if isinstance(self._passes, GraphedPasses):
            self._passes.forget(adapter)

    def step(self) -> list[SampledToken]:
        """See Sampling."""
        running = list(self._running)
        entries: list[_Entry] = []
        try:
            self._enter(entries)
        except BaseException:  # the cache may have grown in some layers alone
            self._leave_again(entries)
            self.free()
            raise
        try:
            if running:  # first, since it writes into slots that are not prefilled yet
                self._take(running, self._passes.decode([_next_token(sample) for sample in running]))
            if entries:
                self._prefill(entries)
        except BaseException as error:
            self._leave_again(entries)
            if isinstance(error, torch.OutOfMemoryError):
                self._alone = PREFILL_TOKENS
            raise
        out, self._out = self._out, []
        return out

    def free(self) -> None:
        """See Sampling."""
        again = [_Entry(one.request, (*one.request.prompt, *one.ids), [one], False) for one in self._running]
        self._queue.extendleft(reversed(again))
        self._running = []
        self._passes.free()

    # --- who enters ------------------------------------------------------------------------------------------------------

    def _enter(self, entered: list[_Entry]) -> None:
        """Give slots to the requests that wait longest, as far as there is room. entered: gets them."""
        tokens, busy = 0, bool(self._running)
        while self._queue:
            entry = self._queue[0]
            tokens += len(entry.ids)
            if entered and tokens > (PREFILL_TOKENS if busy or entry.scored else self._alone):
                break
            slots = self._free_slots(entry.length, len(entry.samples))
            if not slots:
                break
            own, others = entry.samples[: len(slots)], entry.samples[len(slots) :]
            for sample, slot in zip(own, slots, strict=True):
                sample.slot = slot
            self._running += own
            entered.append(replace(entry, samples=own))
            self._queue.popleft()
            if others:
                self._queue.appendleft(replace(entry, samples=others, is_first=False))

    def _free_slots(self, length: int, wanted: int) -> list[int]:
        """Free slots with so many places, at most as many as wanted; the cache grows for them as far as it may."""
        cache, running = self._passes.cache, self._running
        length = min(max(1 << (length - 1).bit_length(), LEAST_LENGTH), self.cache_tokens)
        if (
            running or self.rows * cache.length <= self.cache_tokens
        ):  # else the last long ones leave room for more slots
            length = max(length, cache.length)
        most = min(self.rows, self.cache_tokens // length)
        slots = min(most, max(1 << (len(running) + wanted - 1).bit_length(), min(cache.slots, most)))
        if len(running) >= slots:
            return []
        if (slots, length) != (cache.slots, cache.length):
            cache.resize(slots, length, {sample.slot: number for number, sample in enumerate(running)})
            for number, sample in enumerate(running):
                sample.slot = number
        taken = {sample.slot for sample in running}
        return [slot for slot in range(slots) if slot not in taken][:wanted]

    def _leave_again(self, entries: Sequence[_Entry]) -> None:
        """Put requests whose prefill failed back to where they waited."""
        own = {id(sample) for entry in entries for sample in entry.samples}
        self._running = [sample for sample in self._running if id(sample) not in own]
        self._queue.extendleft(reversed(entries))

    # --- tokens ----------------------------------------------------------------------------------------------------------

    def _prefill(self, entries: Sequence[_Entry]) -> None:
        prompts = []
        for entry in entries:
            last = len(entry.ids) - 1
            slots = [sample.slot for sample in entry.samples]
            prompts.append(Prompt(entry.ids, entry.request.adapter, slots, range(last + 1) if entry.scored else [last]))
        logits = self._passes.prefill(prompts)
        scores = {
            entry.samples[0].ticket: prompt_scores(own[:-1], entry.request)
            for entry, own in zip(entries, logits, strict=True)
            if entry.scored
        }
        rows = [own[-1:].expand(len(entry.samples), -1) for entry, own in zip(entries, logits, strict=True)]
        self._take([sample for entry in entries for sample in entry.samples], torch.cat(rows), scores)

    def _take(
        self, samples: Sequence[Growing], logits_RV: torch.Tensor, scores: dict[int, PromptScores] | None = None
    ) -> None:
        """Draw the next token of these samples. scores: of prompts, by ticket."""
        drawn = draw(logits_RV, [one.request for one in samples], [one.uniform for one in samples])
        ended = set[int]()
        for sample, token, logprob, top, entropy in zip(samples, *drawn, strict=True):
            text, reason = sample.take(token, logprob)
            if reason is not None:
                ended.add(id(sample))
            if reason == "not finite":
                self._passes.cache.clear(sample.slot)
            own = scores.get(sample.ticket) if scores and sample.number == 0 else None
            self._out.append(
                SampledToken(sample.ticket, sample.number, token, logprob, text, reason, top, own, entropy)
            )
        if ended:
            self._running = [sample for sample in self._running if id(sample) not in ended]


def sampler_for(
    model: PreTrainedModel, attached: Attached, tokenizer: Any = None, own: torch.Tensor | None = None,
    settings: GenerationConfig | None = None, **room: Any,
) -> tuple[Sampler | LibrarySampler, str | None]:  # fmt: skip
    """A Sampler where the model's cache is keys and values of tokens alone, else transformers' own generation, request by
    request, and why.

    Args:
        model: made ready by prepare_model.
        own: see cached_proof.own_probe; where the untouched model was run before.
        settings: generation settings to keep to, penalties among them; None: none.
        room: as those of Sampler.
    """
    reason = settings_that_change(settings) or why_not_cached(model, own)
    if reason is None:
        return Sampler(model, attached, tokenizer, **room), None
    return LibrarySampler(model, attached, tokenizer, room.get("context"), settings), reason


def sample(sampler: Sampling, requests: Sequence[SampleRequest]) -> list[list[list[SampledToken]]]:
    """Submit requests and wait for all: by request and sample its tokens.

    Raises:
        InputError: a request cannot be served; none is then.
    """
    tickets: dict[int, list[list[SampledToken]]] = {}
    try:
        for request in requests:
            tickets[sampler.submit(request)] = [[] for _ in range(request.num_samples)]
        going = sum(map(len, tickets.values()))
        while going:
            for token in sampler.step():
                if token.ticket in tickets:
                    tickets[token.ticket][token.sample].append(token)
                    going -= token.reason is not None
    except BaseException:
        for ticket in tickets:
            sampler.cancel(ticket)
        raise
    return list(tickets.values())
