"""Sampling by transformers' own generation, request by request: for models whose cache is more than keys and values of tokens
(recurrences, images), and for generation settings that change logits. Tokens are drawn here, as everywhere.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from packlora.adapters.linear import Attached
from packlora.base.shape import attention_of_text, context_of, vocabulary
from packlora.engine.draw import draw, prompt_scores
from packlora.engine.growing import Growing
from packlora.engine.passes import one_error_for_memory
from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sampling import SampledToken, SampleRequest, check_request

OF_DRAWING = {
    "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "bos_token_id", "pad_token_id", "max_length",
    "max_new_tokens", "transformers_version", "cache_implementation", "use_cache",
}  # fmt: skip
"""Generation settings that requests say themselves, or that change no logits."""


def settings_that_change(settings: GenerationConfig | None) -> str | None:
    """Describe the generation settings that change logits; None where there are none."""
    if settings is None:
        return None
    own = {key: value for key, value in settings.to_diff_dict().items() if key[0] != "_" and key not in OF_DRAWING}
    found = ", ".join(f"{key} {value}" for key, value in sorted(own.items()) if value is not None)
    return f"its generation settings change logits ({found})" if found else None


class LibrarySampler:
    """Sampling of any model that transformers generates with. One request runs at a time, as a whole.

    Args:
        settings: generation settings to keep to; None: none.
        others: as those of Sampler.
    """

    def __init__(
        self, model: PreTrainedModel, attached: Attached, tokenizer: Any = None, context: int | None = None,
        settings: GenerationConfig | None = None,
    ) -> None:  # fmt: skip
        self.model, self.attached, self.tokenizer = model, attached, tokenizer
        self.context, self.vocabulary = context or context_of(model.config), vocabulary(model)
        self._settings = settings
        self._queue: deque[tuple[int, SampleRequest, int]] = deque()
        """Tickets, requests, and tokens that the context has left for each."""
        self._tickets = 0

    @property
    def waiting(self) -> int:
        """See Sampling."""
        return sum(request.num_samples for _, request, _ in self._queue)

    def submit(self, request: SampleRequest) -> int:
        """See Sampling."""
        room = check_request(request, self.vocabulary, self.context, self.tokenizer is not None)
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._queue.append((ticket, request, room))
        return ticket

    def cancel(self, ticket: int) -> None:
        """See Sampling."""
        self._queue = deque(waiting for waiting in self._queue if waiting[0] != ticket)

    def forget(self, adapter: int) -> None:
        """Nothing is kept of an adapter."""

    def free(self) -> None:
        """Nothing is kept between requests."""

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        """See Sampling; all tokens of one request."""
        if not self._queue:
            return []
        ticket, request, room = self._queue[0]
        samples = Growing.of(ticket, request, room, self.tokenizer)
        ids = torch.tensor([request.prompt], device=self.model.device)
        owner = contextlib.nullcontext() if request.adapter == NO_ADAPTER else self.attached.only(request.adapter)
        told: list[SampledToken] = []
        with one_error_for_memory(), self._own_attention(), owner:
            scores = None
            if request.scores_prompt:
                logits = self.model(input_ids=ids, use_cache=False, **request.arguments).logits[0, :-1]
                scores = prompt_scores(logits, request)
            together = [[sample] for sample in samples] if request.arguments else [samples]
            for own in together:
                drawing = _Drawing(own)
                self._generate(ids.expand(len(own), -1), request, drawing, own[0].limit)
                told += drawing.told
        self._queue.popleft()
        if scores is not None:
            at = next(number for number, token in enumerate(told) if token.sample == 0)
            told[at] = told[at]._replace(scores=scores)
        return told

    def _generate(self, ids: torch.Tensor, request: SampleRequest, drawing: _Drawing, limit: int) -> None:
        settings = GenerationConfig(**(self._settings.to_diff_dict() if self._settings is not None else {}))
        settings.update(
            do_sample=False, temperature=None, top_p=None, top_k=None, bos_token_id=None,
            eos_token_id=sorted(request.stop_tokens) or self.vocabulary,  # None would be the model's own
            pad_token_id=0, max_length=None, max_new_tokens=limit,
        )  # fmt: skip
        self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings,
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([_Ended(drawing)]), **request.arguments,
        )  # fmt: skip

    @contextlib.contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Run the model by an attention of transformers', which keeps a cache and does not pack. Layers that are checkpointed
        are in training mode, in which transformers gives them no cache."""
        before = self.model.config.get_text_config()._attn_implementation
        training = [module for module in self.model.modules() if module.training]
        name = "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"
        self.model.set_attn_implementation(attention_of_text(self.model, name))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
            self.model.set_attn_implementation(attention_of_text(self.model, before))


class _Drawing(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of each sample, and leaves transformers no other."""

    def __init__(self, samples: Sequence[Growing]) -> None:
        self.samples = samples
        self.told: list[SampledToken] = []
        self.ended = [False] * len(samples)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        going = [number for number, ended in enumerate(self.ended) if not ended]
        requests = [self.samples[number].request for number in going]
        drawn = draw(scores[going], requests, [self.samples[number].uniform for number in going])
        chosen = torch.zeros(len(self.samples), dtype=torch.int64)
        for number, token, logprob, top, entropy in zip(going, *drawn, strict=True):
            one = self.samples[number]
            text, reason = one.take(token, logprob)
            self.ended[number], chosen[number] = reason is not None, token
            self.told.append(SampledToken(one.ticket, one.number, token, logprob, text, reason, top, None, entropy))
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, chosen[:, None].to(scores.device), 0.0)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, drawing: _Drawing) -> None:
        self.drawing = drawing

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(self.drawing.ended, device=input_ids.device)
