"""Models of a service that come and go while they train, for tests of its CUDA graphs on a CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from serving import Talk, datum

from packlora.serve.host import Host
from packlora.serve.service import Service

MODELS: dict[str, dict[str, Any]] = {
    "dropped": {"rank": 2, "lora_dropout": 0.3}, "dora": {"rank": 3, "use_dora": True},
    "later": {"rank": 4, "target_modules": ["v_proj", "lm_head"]}, "heir": {"rank": 2, "lora_dropout": 0.3, "seed": 4},
    "two products": {"rank": 2, "use_dora": True, "lora_dropout": 0.3}, "plain": {"rank": 2},
}  # fmt: skip
"""Models: one that takes the seat of another, and one that no graph holds beside others."""
LENGTHS = {"dropped": [9, 4], "dora": [12], "later": [6, 7], "heir": [8, 5], "two products": [5]}


class Story:
    """Models that train together, one of which comes later, and one leaves.

    Args:
        state: folder of the service, to be made.
        longer: factor of the lengths of samples.
        targets: modules that most models adapt.
    """

    def __init__(self, host: Host, state: Path, longer: int = 1, targets: str | list[str] = "v_proj") -> None:
        state.mkdir()
        self.service = Service({host.facts.name: host}, state)
        self.talk, self.longer, self.targets = Talk(self.service), longer, targets
        self.session, self.models = self.talk.session(), dict[str, str]()
        self.logprobs: list[np.ndarray] = []
        self.tensors: list[np.ndarray] = []

    def enter(self, *names: str) -> None:
        for name in names:
            targets = [self.targets] if isinstance(self.targets, str) else self.targets
            more = {"target_modules": targets, "seed": 3} | MODELS[name]
            self.models[name] = self.talk.model(self.session, [*MODELS].index(name), **more)

    def step(self, number: int, lr: float = 1e-2) -> None:
        """Each model learns from its rows by two losses, whose gradients add up."""
        promises = []
        for name, model in self.models.items():
            own = [datum(10 * number + at, self.longer * length) for at, length in enumerate(LENGTHS[name])]
            promises.append(self.talk.forward_backward(model, own))
            L = 5 * self.longer
            sampled = datum(99, L, logprobs=np.full(L, -5.0), advantages=np.linspace(-1, 1, L))
            promises.append(self.talk.forward_backward(model, [sampled], "ppo"))
            self.talk.step(model, lr, grad_clip_norm=1.0)
        self.talk.run()
        self.logprobs += [self.talk.result(promise)[1] for promise in promises]

    def learn(self, name: str) -> None:
        """A microbatch of one model alone, without a step."""
        self.talk.forward_backward(self.models[name], [datum(7, 9 * self.longer)])
        self.talk.run()

    def leave(self, name: str) -> None:
        self.tensors += [tensor.float().numpy() for tensor in self.talk.tensors(self.models[name]).values()]
        self.service.close_model(self.models.pop(name))

    def run(self) -> list[np.ndarray]:
        """All log-probabilities, and what the models have become."""
        self.enter("dropped")
        self.learn("dropped")
        self.enter("dora")
        self.step(0)
        self.step(1)
        self.enter("later")
        self.step(2)
        self.step(3)
        self.learn("dropped")  # no step follows
        self.leave("dropped")
        self.enter("heir")
        self.step(4)
        self.enter("two products")
        self.step(5)
        for name in tuple(self.models):
            self.leave(name)
        return [*self.logprobs, *self.tensors]
