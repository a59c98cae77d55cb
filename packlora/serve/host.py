"""A base model that is served: on its device, with an engine that trains adapters on it, and a sampler.

Only the service's thread calls what computes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packlora.adapters.attach import Adapter, attach, attach_one, detach_one
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.starts import begin
from packlora.base.load import load_skeleton, load_tokenizer
from packlora.base.model import Base, load_base
from packlora.base.shape import context_of, vocabulary
from packlora.config import Run
from packlora.data.prompts import answer_ends
from packlora.data.targets import TargetSample
from packlora.engine.adapters import AdapterState
from packlora.engine.engine import Engine
from packlora.engine.generate import sampler_for
from packlora.engine.graphs import GraphedDevice
from packlora.engine.loss_scale import LossScale
from packlora.engine.memory import TokenBudget, free_memory
from packlora.engine.parts import Part, Parts, num_tokens
from packlora.engine.passes import Executor, MicrobatchResult, SingleDevice
from packlora.engine.rows import Row
from packlora.engine.sampling import SampleRequest, Sampling, check_request
from packlora.errors import InputError
from packlora.parallel.alone import ALONE, Alone
from packlora.plans.select import PlanChooser
from packlora.run_file import run_from
from packlora.runtime.prepared_job import AUTO_BUDGET
from packlora.runtime.starts import float_weights, quantises
from packlora.serve import values
from packlora.serve.adapters import METADATA, Wanted
from packlora.serve.errors import Refused
from packlora.serve.graphs import graphs_of
from packlora.serve.losses import FACTS, objective_of
from packlora.serve.optimizer import FIRST
from packlora.serve.seats import SEAT_SECONDS, Seats, restart
from packlora.serve.values import Values

TAKEN = ("parallel", "jobs", "sweep", "output_dir", "base_model")
"""Keys of a run file that the service sets itself, or does not take."""


def freeze() -> None:
    """Let collections of garbage pass over what there is by now, libraries and base models, which stays: one that looks at it
    takes half a second, in which nobody is served."""
    gc.collect()
    gc.freeze()


def run_of(path: str, settings: Sequence[str], quantization: str | None, state: Path, tensor: int = 1) -> Run:
    """Run file's keys of a base model. settings: KEY=VALUE. tensor: processes that hold it together. Raises InputError."""
    for setting in settings:
        key = setting.partition("=")[0].partition(".")[0]
        if key in TAKEN:
            raise InputError(f"--set {setting}: {key} is not for packlora serve")
    tree: dict[str, Any] = {
        "base_model": path, "output_dir": str(state), "max_tokens_per_microbatch": "auto",
        "jobs": [{"name": "serve", "data": {"path": "-"}}], "parallel": {"tensor": tensor},
    }  # fmt: skip
    if quantization is not None:
        tree["quantization"] = quantization
    return run_from(tree, list(settings))


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that requests are checked against: names, sizes and ends of answers."""

    name: str
    path: str
    architecture: str
    vocabulary: int
    context: int
    ends: tuple[int, ...]


class Host:
    """A base model with an engine. A base that several processes hold together is in group/.

    Args:
        name: that clients ask for.
        run: settings, as run_of makes them.
        context: most tokens of a sample or of a prompt with its answer; at most the model's own.
        budget: tokens of a microbatch; None: the run's, or what is usual on the device.

    Raises:
        InputError: as load_base.
    """

    group: Alone = ALONE
    """Processes that hold the base model."""

    def __init__(self, name: str, run: Run, context: int, budget: int | None = None) -> None:
        self.run, self.tokenizer = run, load_tokenizer(run)
        self.skeleton = load_skeleton(run)
        context = min(context, context_of(self.skeleton.config))
        self.base = self._load({"a tenant's longest sample": context})
        model = self.base.model
        ends = tuple(answer_ends(self.tokenizer, model))
        self.facts = Facts(name, self.base.path, model.config.model_type, vocabulary(model), context, ends)
        self.attached, _ = attach(model, {}, 0, storage=self.base.storage)
        self.chooser = PlanChooser(self.base.device)
        self.attached.choosers = (self.chooser,)
        single = SingleDevice(self.base, self.attached)
        self.graphs = self._graphs(single)
        self.executor: Executor = self.graphs or single
        self.seats = None if self.graphs is None else Seats(self.graphs)
        asked, usual = run.max_tokens_per_microbatch, AUTO_BUDGET[self.base.device.type]
        tokens = budget or (usual if asked == "auto" else int(asked))
        self.budget = self._budget(tokens, asked == "auto")
        self.engine = self._engine()
        self.is_scaled = run.dtype == "float16"
        """Whether losses are scaled before a backward."""
        self.states: dict[int, AdapterState] = {}
        self._sampling: Sampling | None = None
        self._number = 0
        self._adapt_all()

    def _load(self, longest: Mapping[str, int]) -> Base:
        """Load the base model. longest: see load_base."""
        return load_base(self.run, self.tokenizer, longest)

    def _graphs(self, single: SingleDevice) -> GraphedDevice | None:
        """The executor with CUDA graphs; None where there is none."""
        return graphs_of(self.run, self.base, single)

    def _budget(self, tokens: int, is_auto: bool) -> TokenBudget:
        """Tokens of a microbatch. is_auto: whether they may be less once memory has run out."""
        return TokenBudget(tokens, 1, is_auto, self.base.device)

    def _engine(self) -> Engine:
        return Engine(self.executor, self.group, self.budget)

    def _adapt_all(self) -> None:
        """Let all linear layers be layers with adapters from the first microbatch on. Which layers are affects the order of
        sums, and so bits, which must not depend on who was there before."""
        parts = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), True)
        spec = self.spec_of(Wanted({"r": 1, "lora_alpha": 1}, parts, 0))
        self.detach(self.attach("layers", spec, 0))

    @property
    def device(self) -> torch.device:
        return self.base.device

    def take_device(self) -> None:
        """Let this thread launch kernels on the device; a thread begins with the first GPU."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    @property
    def sampling(self) -> Sampling:
        """The sampler, made when it is first needed."""
        if self._sampling is None:
            context = self.facts.context
            self._sampling, _ = sampler_for(self.base.model, self.attached, self.tokenizer, context=context)
        return self._sampling

    @property
    def samples(self) -> int:
        """Samples that have not ended."""
        return 0 if self._sampling is None else self._sampling.waiting

    def check_sample(self, request: SampleRequest) -> None:
        """Raises Refused where the sampler cannot serve a request. Any thread may call it."""
        try:
            check_request(request, self.facts.vocabulary, self.facts.context, has_tokenizer=True)
        except InputError as error:
            raise Refused(str(error)) from None

    # --- adapters ----------------------------------------------------------------------------------------------------------

    def spec_of(self, wanted: Wanted) -> AdapterSpec:
        """Resolve an adapter that was asked for. Raises Refused, in words. Any thread may call it."""
        return wanted.spec(self.skeleton, self.facts.path)

    def check_start(self, spec: AdapterSpec) -> None:
        """Raises Refused where a new adapter cannot begin as it was asked for. Any thread may call it."""
        is_loftq = any(spec.modules[path].start == "loftq" for path in spec.of_weights)
        if is_loftq and not quantises(self.run, self.skeleton):
            raise Refused(
                f"{METADATA}.init_lora_weights: loftq makes up for what quantization loses, and {self.facts.name} is not "
                "quantised while it is loaded; leave it out"
            )

    def seat(self, name: str, spec: AdapterSpec, seed: int) -> Adapter:
        """Put an adapter that is to be trained onto the model, in a seat that is empty or a new one. Raises as attach."""
        adapter = None if self.seats is None else self.seats.take(spec)
        if adapter is None:
            return self.attach(name, spec, seed)
        restart(self.base.model, self.attached, adapter, name, spec, seed)
        self._begin(adapter, seed)
        return adapter

    def attach(self, name: str, spec: AdapterSpec, seed: int) -> Adapter:
        """Put an adapter onto the model. Raises MemoryError where there is no room."""
        number, self._number = self._number, self._number + 1
        choosers: Mapping[str, PlanChooser] = dict.fromkeys(spec.modules, self.chooser)
        try:
            adapter = attach_one(self.base.model, self.attached, name, number, spec, seed, choosers)
            self._begin(adapter, seed)
        except BaseException as error:
            detach_one(self.base.model, number)
            if isinstance(error, torch.OutOfMemoryError):
                free_memory(self.device)
                if self.tidy(0):
                    return self.attach(name, spec, seed)
                raise MemoryError(f"out of memory on {self.device} for another adapter") from error
            raise
        finally:
            self._layers_changed()
        return adapter

    def _begin(self, adapter: Adapter, seed: int) -> None:
        if adapter.spec.of_weights:
            begin(self.base.model, adapter, seed, lambda: float_weights(self.run))

    def _layers_changed(self) -> None:
        if self.graphs is not None:
            self.graphs.layers_changed()

    def detach(self, adapter: Adapter) -> None:
        """Take an adapter off the model."""
        if self.states.pop(adapter.number, None) is not None:
            self.engine.follow(self.states)
        if self.seats is None or not self.seats.leave(adapter):
            self._take_off(adapter)

    def _take_off(self, adapter: Adapter) -> None:
        detach_one(self.base.model, adapter.number)
        if self._sampling is not None:
            self._sampling.forget(adapter.number)
        self._layers_changed()

    def tidy(self, seconds: float = SEAT_SECONDS) -> bool:
        """Take off what nobody has used for so long. Returns whether there was anything."""
        left = [] if self.seats is None else self.seats.clear(seconds)
        for adapter in left:
            self._take_off(adapter)
        return bool(left)

    def state_of(self, adapter: Adapter) -> AdapterState:
        """State of an adapter that is to be trained, before its first step."""
        return AdapterState(adapter, FIRST, 1, LossScale() if self.is_scaled else None)

    def take(self, adapter: Adapter, state: AdapterState | None, found: Values) -> None:
        """Let an adapter take values, and its state, where it has one, what there is beside them."""
        values.take(adapter, state, found)

    def parameters(self, state: AdapterState) -> Mapping[str, torch.Tensor]:
        """See values.parameters."""
        return values.parameters(state)

    def moments(self, state: AdapterState) -> dict[str, torch.Tensor]:
        """See values.moments."""
        return values.moments(state)

    def train(self, adapter: Adapter, state: AdapterState) -> None:
        """Let an adapter own rows and step."""
        self.states[adapter.number] = state
        self.engine.follow(self.states)
        if self.seats is not None:
            self.seats.hold(state)

    def evaluate(self, parts: Parts) -> MicrobatchResult | None:
        """Losses of rows without gradients; None where memory ran out and a smaller microbatch may fit."""
        run: Callable[[], MicrobatchResult] = lambda: self.executor.evaluate(parts, by_graph=True)  # noqa: E731
        return self.budget.attempt(num_tokens(parts), run)

    def score(self, adapter: int, ids: np.ndarray) -> np.ndarray | None:
        """Log-probabilities [n - 1] of tokens [n] from the second on, as training computes them; None as of `evaluate`."""
        row = Row(TargetSample.of(ids, np.arange(len(ids) - 1), ids[1:]))
        found = self.evaluate([Part(adapter, [row], objective_of("cross_entropy", {}), facts=FACTS)])
        return None if found is None else -found.losses_L[: len(ids) - 1].cpu().double().numpy()
