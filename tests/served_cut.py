"""A service whose base model is cut over the processes of ranks.py, and a story of two models; functions run on every rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from serving import NAME, Talk, datum

from packlora.errors import ProcessError
from packlora.serve.errors import Refused
from packlora.serve.group import leader
from packlora.serve.group.follower import work
from packlora.serve.group.host import GroupHost
from packlora.serve.group.leader import led
from packlora.serve.host import Host, run_of
from packlora.serve.ranks.meeting import Place, gathered, joined
from packlora.serve.tenant import Tenant

KINDS: list[dict[str, Any]] = [
    {"rank": 8, "seed": 3},
    {
        "rank": 3, "seed": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj", "lm_head"], "lora_alpha": 6,
        "lora_dropout": 0.2,
    },
]  # fmt: skip
LOSSES = ("cross_entropy", "ppo")
PROMPT = [60, 61, 62]
MOST = 400_000
"""Elements for which the second rank has room."""


@contextmanager
def cut(rank: int, size: int, base: str, state: Path, *settings: str) -> Iterator[Talk | None]:
    """A client of a service, on rank 0; None on the others once it is over."""
    place = Place(rank, size, rank, size)

    def runs() -> dict[str, Any]:
        return {NAME: run_of(base, ["max_tokens_per_microbatch=64", *place.settings(settings)], None, state, size)}

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

    def __init__(self, talk: Talk) -> None:
        self.talk, self.session = talk, talk.session()
        self.models = [talk.model(self.session, number, **own) for number, own in enumerate(KINDS)]
        last = "select model, max(seq) as seq from requests where model is not null group by model"
        talk.seqs |= {row["model"]: row["seq"] for row in talk.service.journal.all(last)}
        self.results: list[Any] = []
        self.scores: list[float] = []
        """Log-probabilities of the prompt by the first model."""

    def learn(self, steps: range) -> None:
        """Steps of both."""
        talk, promises = self.talk, list[str]()
        for step in steps:
            for number, model in enumerate(self.models):
                promises.append(talk.forward_backward(model, rows(number, step), LOSSES[number]))
                promises.append(talk.step(model, weight_decay=0.1, grad_clip_norm=0.5))
        talk.run()
        self.results += [plain(talk.result(own)) for own in promises]

    def go_back(self) -> None:
        """Both are saved, take a step and begin another, and load what they were, one with its optimizer."""
        talk, promises = self.talk, list[str]()
        for model in self.models:
            talk.call(model, "save_weights", path="kept")
        talk.run()
        for number, model in enumerate(self.models):
            talk.forward_backward(model, rows(number, 9)[:1], LOSSES[number])
            talk.step(model)
            talk.forward_backward(model, rows(number, 8)[:1], LOSSES[number])  # its gradient is forgotten
            path = f"tinker://{model}/weights/kept"
            promises.append(talk.call(model, "load_weights", path=path, optimizer=not number))
        talk.run()
        self.results += [plain(talk.result(own)) for own in promises]

    def rest(self) -> None:
        """Both leave the base, and come back with their next work."""
        for lane in self.talk.service.queue.lanes.values():
            self.talk.service._set_aside(lane)

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
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*PROMPT[:-1], PROMPT[-1] + number]}]},
                "sampling_params": {"max_tokens": 5, "seed": number, "temperature": 1.0},
            }  # fmt: skip
            promises.append(talk.desk.asample(talk.owner, asked)[0])
        talk.run()
        for promise in promises:
            result = talk.result(promise)
            assert not isinstance(result, Mapping), result
            for own in result.sequences:
                tokens, logprobs = np.frombuffer(own.tokens, "<i4"), np.frombuffer(own.logprobs, "<f4")
                assert len(tokens) == len(logprobs) > 0
                self.results.append((tokens.tolist(), logprobs.tolist()))
            self.scores += np.frombuffer(result.prompt_logprobs, "<f4").tolist()[1:]

    def end(self, name: str = "end") -> dict[str, Any]:
        """All that it has come to. name: of what is saved."""
        return {
            "results": self.results,
            "scores": self.scores,
            "tensors": [self.talk.tensors(model, name) for model in self.models],
        }


def rows(number: int, step: int) -> list[Any]:
    """Rows of a step of a model; of the first one the same 32 labels for all steps, whose mean is its loss."""
    if not number:
        return [datum(n, 8, weights=np.full(8, 1 / 32)) for n in range(4)]
    values = np.random.default_rng(step)
    policy = [
        {"logprobs": -5 + values.normal(size=8 + n) / 9, "advantages": values.normal(size=8 + n)} for n in range(3)
    ]
    return [datum(100 + 10 * step + n, 8 + n, **own) for n, own in enumerate(policy)]


def plain(result: Any) -> Any:
    """A result without ids, which differ."""
    if isinstance(result, tuple):
        return dict(result[0]), result[1].tolist()
    return {key: own for key, own in result.items() if key not in ("path", "sampling_session_id")}


@mock.patch.object(Tenant, "kind", None)
def whole(talk: Talk) -> tuple[dict[str, Any], Story]:
    """The whole story. The two adapt different modules, in one microbatch, as on a GPU."""
    story = Story(talk)
    story.end("start")
    story.learn(range(2))
    story.go_back()
    story.learn(range(2, 3))
    story.rest()
    story.learn(range(3, 4))
    story.sample()
    return story.end(), story


def told(rank: int, size: int, base: str, state: Path, device: str = "cpu") -> dict[str, Any] | None:
    """The story on so many ranks; then a model asks for more than the second one has."""
    rooms = mock.patch.object(GroupHost, "has_room", lambda self, elements: not (rank and elements > MOST))
    with rooms, cut(rank, size, base, state, f"device={device}", "dtype=float64") as talk:
        if talk is None:
            return None
        found, story = whole(talk)
        model = talk.model(talk.session("large"), rank=60)
        promise = talk.forward_backward(model, rows(0, 0))
        talk.run()
        return found | {"large": str(talk.result(promise)), "refused": refused(talk, story)}


def refused(talk: Talk, story: Story) -> list[str]:
    """What is said of adapters that begin with what is in whole weights: a new one, and a checkpoint of one."""
    with pytest.raises(Refused) as first:
        talk.model(story.session, 7, init_lora_weights="olora")
    path = f"tinker://{story.models[0]}/weights/kept"
    with talk.service.journal.write() as db:
        set_it = "update checkpoints set spec = json_set(spec, '$.adapter.init_lora_weights', 'olora') where path = ?"
        db.execute(set_it, (path,))
    body = {"session_id": story.session, "model_seq_id": 8, "path": path}
    with pytest.raises(Refused) as second:
        talk.desk.load_as_new(talk.owner, body)
    assert len(talk.service.tenants) == len(KINDS) + 1
    return [first.value.text, second.value.text]


def failing(rank: int, base: str, state: Path) -> str:
    """What a service says whose second rank runs out of memory in a microbatch, while the first one waits for it."""

    def evaluate(self: Host, parts: Any) -> None:
        raise MemoryError("out of memory on cpu in a microbatch of 60 tokens")

    patch = mock.patch.object(Host, "evaluate", evaluate) if rank else mock.patch.object(leader, "LAST_WORDS", 0.1)
    failed = threading.Event()
    try:
        with patch, cut(rank, 2, base, state) as talk:
            assert talk is not None
            talk.service.on_failure = failed.set
            talk.service.start()
            talk.forward_backward(talk.model(talk.session()), rows(0, 0), only=True)
            assert failed.wait(60)
            assert talk.service.stop() == 1, "the request waits for the next start"
            assert talk.service.failure is not None
            raise talk.service.failure
    except ProcessError as error:
        return str(error)
    return "it did not fail"
