"""A model of a client: an adapter in training, which can be put aside and made again from its snapshot and its requests.

    <folder>/start/            a checkpoint that it began with
    <folder>/N.safetensors     snapshot: parameters and optimizer after request N, which is an optimizer step or a load

A model is on the base only while it has work. What is put aside, or lost with the process, is made again: the snapshot, then
the requests behind it, which the journal keeps. A CPU gives the same bits again, since nothing of a model's numbers depends on
who else is there.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

from packlora.adapters.attach import Adapter
from packlora.adapters.files import save_adapter
from packlora.adapters.spec import AdapterSpec
from packlora.data.encode import Sample
from packlora.engine.adapters import AdapterState
from packlora.engine.optimizer import FlatAdamW
from packlora.engine.rows import Row
from packlora.errors import InputError
from packlora.files import write_folder, write_tensors
from packlora.seeding import stable_hash
from packlora.serve.adapters import Wanted
from packlora.serve.errors import Failed
from packlora.serve.host import Host
from packlora.serve.optimizer import Settings
from packlora.serve.proof import TOKENS as SCORED
from packlora.serve.proof import Scored
from packlora.serve.queue import Request
from packlora.serve.values import OPTIMIZER, Values, numbers_of, read_folder, read_snapshot

START = "start"
LOSSES = 100
"""Losses that are kept for the page."""
SNAPSHOT_TOKENS = 1 << 18
"""Tokens of forward_backwards after which an optimizer step is followed by a snapshot."""


class Tenant:
    """A model.

    Args:
        folder: of its files.
        snapshot: number of the request after which its newest snapshot was made; None: there is none.
    """

    def __init__(
        self, host: Host, id: str, owner: str, session: str, wanted: Wanted, folder: Path, snapshot: int | None
    ) -> None:
        self.host, self.id, self.owner, self.session, self.wanted = host, id, owner, session, wanted
        self.folder, self.snapshot = folder, snapshot
        self.spec: AdapterSpec | None = None
        self.adapter: Adapter | None = None
        self.state: AdapterState | None = None
        self.steps = self.drawn = self.tokens = 0
        """Optimizer steps; rows since the last one; tokens since the snapshot."""
        self.losses: deque[float] = deque(maxlen=LOSSES)
        """Mean losses of a label of its last forward_backwards."""
        self.used_at = 0.0
        """When it last had work, seconds of a monotonic clock."""
        self.trained_at = 0.0
        """When it had its last rows, seconds of a monotonic clock."""
        self.spoilt: int | None = None
        """Number of a forward_backward that failed since the last step, whose gradients are not complete."""
        self.recent = np.arange(min(SCORED, host.facts.context - 1), dtype=np.int32) % host.facts.vocabulary
        """Tokens by which samplers of its weights are proved: the first ones of its last rows."""
        self.dropout_key = stable_hash("dropout", wanted.seed) if wanted.adapter.get("lora_dropout") else None

    @property
    def method(self) -> str:
        return "DoRA" if self.wanted.adapter.get("use_dora") else "LoRA"

    @property
    def is_awake(self) -> bool:
        return self.adapter is not None

    @property
    def is_on_the_base(self) -> bool:
        """Whether it is on a base, in this process or in another one."""
        return self.is_awake

    def wake(self) -> tuple[Adapter, AdapterState]:
        """Put it onto the base, as its snapshot says; what came after that is to be done again."""
        self.used_at = time.monotonic()
        if self.adapter is not None and self.state is not None:
            return self.adapter, self.state
        if self.spec is None:
            self.spec = self.host.spec_of(self.wanted)
        self.adapter = self.host.seat(self.id, self.spec, self.wanted.seed)
        try:
            self.state = self.host.state_of(self.adapter)
            self.steps = self.drawn = self.tokens = 0
            self.spoilt = None
            if self.snapshot is not None:
                self._take(read_snapshot(self.folder / f"{self.snapshot}.safetensors"))
            elif (self.folder / START).is_dir():
                self.load(self.folder / START, (self.folder / START / OPTIMIZER).exists())
        except BaseException:
            self.sleep()
            raise
        self.host.train(self.adapter, self.state)
        return self.adapter, self.state

    def sleep(self) -> None:
        """Take it off the base."""
        if self.adapter is not None:
            self.host.detach(self.adapter)
        self.adapter = self.state = None

    @property
    def kind(self) -> frozenset[str] | None:
        """Modules that it adapts, on a CPU; models of one kind share microbatches. The rounding of a row's gradient depends on
        which layers that read one tensor are computed by one call, and bits must not depend on who else is there. None: any may
        share."""
        return None if self.host.device.type != "cpu" or self.spec is None else frozenset(self.spec.modules)

    @property
    def sums(self) -> torch.Tensor | None:
        """Sums of losses since the last step."""
        return None if self.state is None else self.state.sums

    @property
    def has_gradient(self) -> bool:
        """Whether rows ran since the last step."""
        return self.sums is not None

    # --- rows and steps ----------------------------------------------------------------------------------------------------

    def row(self, sample: Sample, number: int) -> Row:
        """A sample to be learnt. number: of it since the last step."""
        return Row(sample, (self.dropout_key, self.steps, self.drawn + number))

    def spoil(self, seq: int) -> None:
        """A forward_backward failed: the next step is refused."""
        self.spoilt = seq if self.spoilt is None else self.spoilt

    def discard(self) -> None:
        """Forget the gradients since the last step."""
        assert self.state is not None
        self.state.discard()
        self.spoilt, self.drawn = None, 0

    def settle(self, settings: Settings) -> None:
        """The next step has these settings."""
        assert self.state is not None and isinstance(self.state.optimizer, FlatAdamW)
        self.state.max_grad_norm, self.state.optimizer.config = settings.config.max_grad_norm, settings.config

    def saw(self, sample: Sample) -> None:
        """Rows were trained, this one among them."""
        ids = sample.ids[: min(SCORED, self.host.facts.context - 1)]
        self.recent = ids if len(ids) > 1 else self.recent

    def saw_loss(self, request: Request) -> None:
        """A request's rows have run."""
        self.trained_at = time.monotonic()
        if not (request.forward_only or request.is_replayed):
            self.losses.append(request.loss)

    def stepped(self) -> None:
        """A step was taken."""
        self.steps += 1
        self.drawn = 0

    def skipped(self) -> float:
        """A step was skipped, since its gradient overflowed. Returns the loss scale of the next one."""
        assert self.state is not None
        self.drawn = 0
        return self.state.grad_scale

    @property
    def wants_snapshot(self) -> bool:
        """Whether so much came since the last one that doing it again would take long. Asked right after a step."""
        return self.tokens >= SNAPSHOT_TOKENS

    # --- files -------------------------------------------------------------------------------------------------------------

    def write_snapshot(self, seq: int) -> None:
        """Write a snapshot after request number seq, when there are no gradients. The journal names it afterwards, and then
        `drop_snapshot` removes the one before."""
        _, state = self.wake()
        tensors = {f"adapter/{name}": own for name, own in self.host.parameters(state).items()}
        tensors |= {f"optimizer/{name}": own for name, own in self.host.moments(state).items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self.folder / f"{seq}.safetensors", tensors, numbers_of(state, self.steps))
        self.tokens = 0

    def drop_snapshot(self, seq: int) -> None:
        """Remove an older snapshot."""
        (self.folder / f"{seq}.safetensors").unlink(missing_ok=True)

    def save(self, folder: Path, base: str, optimizer: bool) -> int:
        """Write a PEFT adapter folder, whole or not at all. Returns its bytes.

        Args:
            base: name of the base model for its configuration.
            optimizer: whether the optimizer's state is written beside it.
        """
        adapter, state = self.wake()
        peft, scored = adapter.spec.peft, self._scored(adapter)
        parameters, moments = self.host.parameters(state), self.host.moments(state) if optimizer else None

        def write(out: Path) -> None:
            save_adapter(out, adapter, parameters)
            if scored is not None:
                scored.write(out)
            if moments is not None:
                write_tensors(out / OPTIMIZER, moments, numbers_of(state, self.steps))

        before, peft.base_model_name_or_path = peft.base_model_name_or_path, base
        try:
            write_folder(folder, write)
        finally:
            peft.base_model_name_or_path = before
        return sum(file.stat().st_size for file in folder.iterdir())

    def _scored(self, adapter: Adapter) -> Scored | None:
        """Some tokens of the model with their log-probabilities; None where there is no memory for that."""
        try:
            logprobs = self.host.score(adapter.number, self.recent)
        except MemoryError:
            return None
        return None if logprobs is None else Scored(self.recent, logprobs)

    def load(self, folder: Path, optimizer: bool) -> None:
        """Take the values of an adapter folder, and the optimizer's or none. Raises Failed where it is another adapter."""
        assert self.adapter is not None and self.state is not None
        if optimizer and not (folder / OPTIMIZER).exists():
            raise Failed("the checkpoint holds no optimizer state; load it with optimizer: false")
        try:
            found = read_folder(folder, self.adapter, optimizer)
        except InputError as error:
            raise Failed(_without_place(str(error), folder)) from None
        self.discard()
        self._take(found)

    def _take(self, found: Values) -> None:
        """Be as values say."""
        assert self.adapter is not None
        self.host.take(self.adapter, self.state, found)
        self.steps = found.steps


def _without_place(text: str, folder: Path) -> str:
    """Message about a folder that does not say where it lies."""
    return text.replace(f"{folder}/", "").replace(str(folder), "the checkpoint")
