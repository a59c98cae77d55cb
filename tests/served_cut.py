"""A service whose base model is cut over the processes of ranks.py, and a story of two models; functions run on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import NAME, Talk, datum

from packlora.serve.group.follower import work
from packlora.serve.group.leader import led
from packlora.serve.host import run_of
from packlora.serve.ranks.meeting import Place, gathered, joined

KINDS: list[dict[str, Any]] = [
    {"rank": 8, "seed": 3, "lora_dropout": 0.2},
    {"rank": 3, "seed": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj", "lm_head"], "lora_alpha": 6},
]
LOSSES = ("cross_entropy", "ppo")


@contextmanager
def cut(rank: int, size: int, base: str, state: Path, *settings: str) -> Iterator[Talk | None]:
    """A client of a service, on rank 0; None on the others once it is over."""
    place = Place(rank, size, rank, size)

    def runs() -> dict[str, Any]:
        return {NAME: run_of(base, ["device=cpu", "max_tokens_per_microbatch=64", *settings], None, state, size)}

    if rank:
        channel = joined(place, state)
        work(channel, size, runs, 256)
        channel.close()
        yield None
        return
    with gathered(place, state) as channels, led(channels, runs(), 256, state, 0.0) as service:
        yield Talk(service)
        service.stop()


class Story:
    """Two models learn, are saved, loaded and sampled. results: of all requests. tensors: of both at the end."""

    def __init__(self, talk: Talk, again: bool = False) -> None:
        self.talk, self.session = talk, talk.session()
        self.models = [talk.model(self.session, number, **own) for number, own in enumerate(KINDS)]
        if again:
            talk.seqs = dict.fromkeys(self.models, 11)
        self.results: list[Any] = []

    def learn(self, steps: range) -> None:
        """Steps of both, with a save after each."""
        talk, promises = self.talk, list[str]()
        for step in steps:
            for number, model in enumerate(self.models):
                promises.append(talk.forward_backward(model, rows(number, step), LOSSES[number]))
                promises.append(talk.step(model, weight_decay=0.1, grad_clip_norm=0.5))
                promises.append(talk.call(model, "save_weights", path=f"s{step}"))
        talk.run()
        self.results += [plain(talk.result(own)) for own in promises]

    def go_back(self) -> None:
        """Both load what they were, with the optimizer and without."""
        promises = [
            self.talk.call(model, "load_weights", path=f"tinker://{model}/weights/s1", optimizer=not number)
            for number, model in enumerate(self.models)
        ]
        self.talk.run()
        self.results += [plain(self.talk.result(own)) for own in promises]

    def sample(self) -> None:
        """Snapshots of both, an inflight sampler, and the base, in one batch."""
        talk = self.talk
        saved = [talk.call(model, "save_weights_for_sampler") for model in self.models]
        saved.append(talk.call(self.models[1], "save_weights_for_sampler", kind="inflight"))
        talk.run()
        samplers = [talk.result(own)["sampling_session_id"] for own in saved]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": NAME}
        samplers.append(talk.desk.create_sampling_session(talk.owner, body))
        promises = []
        for number, sampler in enumerate(samplers):
            asked = {
                "sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt_logprobs": number == 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [60, 61, 62 + number]}]},
                "sampling_params": {"max_tokens": 8, "seed": number, "temperature": 1.0},
            }  # fmt: skip
            promises.append(talk.desk.asample(talk.owner, asked)[0])
        talk.run()
        for promise in promises:
            result = talk.result(promise)
            assert not isinstance(result, Mapping), result
            self.results += [(list(own.tokens), list(own.logprobs)) for own in result.sequences]
            self.results.append(list(result.prompt_logprobs))

    def end(self) -> dict[str, Any]:
        """All that it has come to."""
        return {"results": self.results, "tensors": [self.talk.tensors(model) for model in self.models]}


def rows(number: int, step: int) -> list[Any]:
    """Rows of a step of a model."""
    import numpy as np

    values = np.random.default_rng([number, step])
    more = [
        {"logprobs": -5 + values.normal(size=20 + n) / 9, "advantages": values.normal(size=20 + n)} if number else {}
        for n in range(4)
    ]
    return [datum(100 * number + 10 * step + n, 20 + n, **own) for n, own in enumerate(more)]


def plain(result: Any) -> Any:
    """A result without ids, which differ."""
    if isinstance(result, tuple):
        return dict(result[0]), result[1].tolist()
    return {key: own for key, own in result.items() if key not in ("path", "sampling_session_id")}


def whole(talk: Talk) -> dict[str, Any]:
    """The whole story."""
    story = Story(talk)
    story.learn(range(3))
    story.go_back()
    story.learn(range(3, 4))
    story.sample()
    return story.end()


def told(rank: int, base: str, state: Path) -> dict[str, Any] | None:
    with cut(rank, 2, base, state, "dtype=float64") as talk:
        return None if talk is None else whole(talk)
