"""`serve`: the service over HTTP, many tenants at once, beside one tenant after the other, PEFT and `packlora train`.

The service runs in a process of its own (tenants.py). Contenders run in turn in one loop; what `packlora train` takes is read
from its log, a run of it and a run of the tenant in turn.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.commands import run_packlora, run_trainer, shape_of, write_rows, write_tokenizer
from benchmarks.harness import Benchmark, Case, Options, Row, case, row_of
from benchmarks.shapes import SHAPES, TARGETS
from benchmarks.tenants import (
    Served,
    Tenant,
    all_at_once,
    one_by_one,
    request_of,
    seconds_of_a_step,
)
from packlora.engine.adapters import AdapterState
from packlora.engine.engine import Slot
from packlora.engine.memory import synchronize
from packlora.engine.parts import Part, Parts
from packlora.engine.rows import Row as EngineRow
from packlora.serve.adapters import Wanted
from packlora.serve.host import Host, run_of
from packlora.serve.limits import Limits
from packlora.serve.losses import FACTS, work_of
from packlora.serve.messages import read_forward_backward
from packlora.serve.optimizer import FIRST
from packlora.serve.publisher import IDLE_SECONDS
from packlora.serve.seats import SEAT_SECONDS
from packlora.tune.timing import Contender, Timings, Work, paired

OWN, SEQUENTIAL, PEFT, TRAIN, ENGINE = "packlora", "sequential", "set_adapter", "train", "engine"
IDLE, AGAIN = "with_idle", "without_again"
RANK, WORDS, WARM = 16, 1000, 2
"""Rank of every adapter; words of the tokenizer; steps of a run that are not counted."""
STILL, RECORDING = 10, 80
"""Runs in which no size is recorded as a CUDA graph, and most runs in all, before any is timed."""
SHAPE = "Qwen3-0.6B"
SMALL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": WORDS + 8,
}  # fmt: skip
"""What a CPU measures instead of the whole shape."""
FIRST_WORD, END = 3, 0
"""Token ids of the tokenizer that commands.py writes: the first word, and the end of a text."""


def serve_cases(options: Options) -> list[Case]:
    if options.tiny and options.quick:
        many = {"tenants": 3, "samples": 2, "steps": 2, "rounds": 2}
        return _cases("toy", many, (8, 16), {"tokens": 16, "samples": 4, "steps": 4, "rounds": 1}, 2, (3, 2))
    if options.tiny:
        many = {"tenants": 16, "samples": 4, "steps": 2, "rounds": 3}
        return _cases("small", many, (64, 250), {"tokens": 256, "samples": 16, "steps": 8, "rounds": 2}, 64, (6, 40))
    many = {"tenants": 16, "samples": 4, "steps": 4, "rounds": 2 if options.quick else 5}
    one = {"tokens": 256, "samples": 64, "steps": 14, "rounds": 1 if options.quick else 3}
    return _cases(SHAPE, many, (64, 250), one, 8 if options.quick else 64, (4, 20) if options.quick else (140, 60))


def _cases(shape: str, many: Row, tokens: tuple[int, int], one: Row, idle: int, rounds: tuple[int, int]) -> list[Case]:
    """rounds: of the case with idle models, and of the latencies."""
    short, long = tokens
    return [
        case("tenants 64", shape=shape, what="tenants", tokens=short, key="mixed_vs_sequential", **many),
        case("latency datum", shape=shape, what="latency", tokens=short, rounds=rounds[1]),
        case(
            "tenants 250",
            shape=shape,
            what="tenants",
            tokens=long,
            key="mixed_vs_sequential_250",
            **many | {"rounds": 3},
        ),
        case("one tenant", shape=shape, what="one", tenants=1, **one),
        case("idle models", shape=shape, what="idle", tokens=short, idle=idle, **many | {"rounds": rounds[0]}),
    ]


BEGAN, SAID_EVERY = time.monotonic(), 1.0
"""When the process began, and the seconds for which it says nothing after a line."""
_said = [0.0]


def say(text: str, at_once: bool = True) -> None:
    """Print what was done, after so many seconds: a run that is stopped has told what it did."""
    now = time.monotonic()
    if at_once or now - _said[0] > SAID_EVERY:
        _said[0] = now
        print(f"{now - BEGAN:7.1f} s  {text}", file=sys.stderr, flush=True)


def told(label: str, work: Callable[[], None]) -> Callable[[], None]:
    """Work that is followed by a line with its time."""

    def run() -> None:
        began = time.perf_counter()
        work()
        say(f"{label}: {1000 * (time.perf_counter() - began):.1f} ms", at_once=False)

    return run


class Setup:
    """A base model on disk and a service of it, both until nothing refers to them."""

    def __init__(self, shape: str, options: Options) -> None:
        self.device, stack = options.device, ExitStack()
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weakref.finalize(self, stack.close)
        self._stack = stack
        values = {"small": SHAPES[SHAPE] | SMALL, "toy": shape_of(SHAPE, WORDS, True), SHAPE: SHAPES[SHAPE]}[shape]
        if options.layers is not None:
            values = values | {"num_hidden_layers": options.layers}
        self.vocabulary = values["vocab_size"]
        write_tokenizer(self.folder / "base", WORDS)
        (self.folder / "case.json").write_text(json.dumps({"shape": values, "trained": False}))
        run_trainer(self.folder, "base")
        say(f"{shape}: the base model is written")
        self.served = self.serve("state")
        self._tenants: list[Tenant] = []

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def serve(self, name: str) -> Served:
        """Another service of the base model."""
        served = Served(self.base, self.folder / name, self.device.type)
        self._stack.callback(served.stop)
        say(f"service {name!r} answers")
        return served

    def tenants(self, count: int) -> list[Tenant]:
        """Tenants of the first service; the same ones each time."""
        self._tenants += self.served.models(count - len(self._tenants), RANK, len(self._tenants))
        return self._tenants[:count]

    def samples(self, count: int, tokens: int, seed: int) -> list[np.ndarray]:
        """Texts of random words with their end: token ids [tokens + 1]."""
        words = np.random.default_rng(seed).integers(0, WORDS, (count, tokens))
        return [np.append(own + FIRST_WORD, END) for own in words]


def _setup(one: Case, options: Options) -> Setup:
    found: Setup = options.shared(one.shape, lambda: Setup(one.shape, options))
    return found


def _timed(works: dict[str, Callable[[], None]], names: Sequence[str], one: Case) -> tuple[Row, Timings]:
    """Time contenders in turn, on the clock on the wall: their work is in other processes, or ends with a wait."""
    chosen = {name: told(f"{one.label}: {name}", work) for name, work in works.items() if name in names}
    contenders = [Contender(name, lambda work=work: Work(work, lambda: None)) for name, work in chosen.items()]  # type: ignore[misc]
    timings = paired(contenders, torch.device("cpu"), 0, (one.rounds, one.rounds), warmup=1)
    row = row_of(timings)
    row.pop("over_frozen"), row.pop("host_us"), row.pop("peak_mib")
    return row | {"over_packlora": {name: timings.ratio(name, OWN) for name in row["ms"] if name != OWN}}, timings


def settle(services: Sequence[Served], works: Sequence[Callable[[], None]], setup: Setup) -> list[int]:
    """On a GPU let tenants work until their services record no more sizes. Returns how many each has recorded."""
    recorded, still = [0] * len(services), 0
    for _ in range(RECORDING if setup.device.type == "cuda" else 0):
        for work in works:
            work()
        now = [own.recorded() for own in services]
        recorded, still = now, still + 1 if now == recorded else 0
        if still >= STILL:
            break
    say(f"sizes that were recorded: {recorded}")
    return recorded


def measure_serve(one: Case, names: list[str], options: Options) -> Row:
    return MEASURES[one.what](one, names, _setup(one, options))


# --- many tenants -----------------------------------------------------------------------------------------------------------


def measure_tenants(one: Case, names: list[str], setup: Setup) -> Row:
    """All tenants at once, one after the other, and one after the other by PEFT."""
    data = [setup.samples(one.samples, one.tokens, number) for number in range(one.tenants)]
    tenants, requests = setup.tenants(one.tenants), [request_of(own) for own in data]
    works = {
        OWN: all_at_once(tenants, requests, one.steps),
        SEQUENTIAL: one_by_one(tenants, requests, one.steps),
    }
    recorded = settle([setup.served], [works[OWN]], setup)
    if PEFT in names and one.label.endswith("250"):
        works[PEFT] = SetAdapter(setup, data).work(one.steps)
    row, _ = _timed(works, names, one)
    tokens = one.tenants * one.samples * one.tokens * one.steps
    return row | {
        "recorded": recorded,
        "tokens_per_s": {name: tokens * 1000 / ms for name, ms in row["ms"].items()},
    }


class SetAdapter:
    """All tenants as adapters of one PEFT model, one after the other: bfloat16 adapters on a GPU, its faster setting, fused
    AdamW, equal samples in one batch without padding, liger-kernel where it is installed.

    Args:
        data: samples of each tenant.
    """

    def __init__(self, setup: Setup, data: Sequence[Sequence[np.ndarray]]) -> None:
        device, self.device = setup.device, setup.device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_pretrained(setup.base, dtype=dtype, attn_implementation="sdpa")
        model = model.to(device)
        if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
            importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
        config = LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        self.names = [f"tenant{number}" for number in range(len(data))]
        self.model: Any = get_peft_model(model, config, self.names[0], autocast_adapter_dtype=False).train()
        for name in self.names[1:]:
            self.model.add_adapter(name, config, autocast_adapter_dtype=False)
        self.batches = [torch.from_numpy(np.stack(own)[:, :-1]) for own in data]
        self.optimizers = [self._optimizer(name) for name in self.names]

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        self.model.set_adapter(name)
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(own, lr=1e-4, weight_decay=0.0, fused=self.device.type == "cuda")

    def work(self, steps: int) -> Callable[[], None]:
        """Each adapter takes so many steps, whose losses are read at the end of each."""

        def run() -> None:
            for name, batch, optimizer in zip(self.names, self.batches, self.optimizers, strict=True):
                self.model.set_adapter(name)
                losses = []
                for _ in range(steps):
                    ids = batch.to(self.device)
                    loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
                assert bool(torch.stack(losses).isfinite().all())
            synchronize(self.device)

        return run


# --- one tenant -------------------------------------------------------------------------------------------------------------


def measure_one(one: Case, names: list[str], setup: Setup) -> Row:
    """Seconds of a step of one tenant and of `packlora train` on the same samples, a run of each in turn."""
    data = setup.samples(one.samples, one.tokens - 1, 0)
    (tenant,), request = setup.served.models(1, RANK, 1000), request_of(data)
    file = _run_file(setup, one, data) if TRAIN in names else None
    seconds: dict[str, list[float]] = {OWN: [], TRAIN: []}
    for number in range(one.rounds):
        if file is not None:
            _, lines, _ = run_packlora(file, setup.folder / f"out{number}")
            ends = [line["elapsed"] for line in lines if line.get("loss") is not None]
            seconds[TRAIN].append(seconds_of_a_step(ends, WARM))
        seconds[OWN].append(seconds_of_a_step(tenant.train(request, one.steps), WARM))
        say(
            f"{one.label}: seconds a step: "
            + ", ".join(f"{name} {own[-1]:.4f}" for name, own in seconds.items() if own)
        )
    tokens = {OWN: one.samples * (one.tokens - 1), TRAIN: one.samples * one.tokens}
    each = {name: [own / tokens[name] for own in found] for name, found in seconds.items() if found}
    row: Row = {
        "rounds": one.rounds, "failed": {},
        "step_s": {name: statistics.median(found) for name, found in seconds.items() if found},
        "tokens_per_s": {name: 1 / statistics.median(own) for name, own in each.items()},
    }  # fmt: skip
    if TRAIN in each:
        row["over_train"] = statistics.median(own / its for own, its in zip(each[OWN], each[TRAIN], strict=True))
    return row


def _run_file(setup: Setup, one: Case, data: Sequence[np.ndarray]) -> Path:
    texts = [" ".join(f"w{token - FIRST_WORD}" for token in ids[:-1]) for ids in data]
    write_rows(setup.folder / "data.jsonl", texts * one.steps)
    job = {
        "name": "a", "data": {"path": str(setup.folder / "data.jsonl")},
        "adapter": {"r": RANK, "lora_alpha": 32, "target_modules": TARGETS},
        "train": {
            "global_batch_size": one.samples, "num_train_epochs": 1, "learning_rate": 1e-4, "shuffle": False,
            "max_grad_norm": 0.0,
        },
    }  # fmt: skip
    file = setup.folder / "run.yaml"
    run = {"base_model": str(setup.base), "device": setup.device.type, "output_dir": "out", "jobs": [job]}
    file.write_text(yaml.safe_dump(run))
    return file


# --- idle models -------------------------------------------------------------------------------------------------------------


def measure_idle(one: Case, names: list[str], setup: Setup) -> Row:
    """All tenants at once on a service without other models, on another such one, which shows what two services differ by of
    themselves, and on one that has some models which were used and then left alone."""
    data = [request_of(setup.samples(one.samples, one.tokens, number)) for number in range(one.tenants)]
    works = {OWN: all_at_once(setup.tenants(one.tenants), data, one.steps)}
    second = setup.serve("idle")
    services = [setup.served, second]
    if AGAIN in names and one.shape != "toy":
        services.append(setup.serve("again"))
        works[AGAIN] = all_at_once(services[-1].models(one.tenants, RANK), data, one.steps)
    own = all_at_once(second.models(one.tenants, RANK), data, one.steps)
    own()
    for tenant in second.models(one.idle, RANK, one.tenants):
        tenant.train(data[0], 1)
    used = second.memory_bytes()
    until = time.monotonic() + (2 if one.shape == "toy" else 3 * IDLE_SECONDS)
    while second.on_the_base() > one.tenants and time.monotonic() < until:
        own()  # they leave one by one, beside the tenants that work
        say(f"{one.label}: {second.on_the_base() - one.tenants} are left on the base", at_once=False)
    until = time.monotonic() + (SEAT_SECONDS + 2 if setup.device.type == "cuda" else 0)
    while time.monotonic() < until:
        own()
    works[IDLE] = own
    recorded = settle(services, list(works.values()), setup)  # models that left let the second one record anew
    row, timings = _timed(works, names, one)
    tokens = one.tenants * one.samples * one.tokens * one.steps
    return row | {
        "tokens_per_s": {name: tokens * 1000 / ms for name, ms in row["ms"].items()},
        "rate_ratio": timings.ratio(OWN, IDLE),
        "over_again": timings.ratio(OWN, AGAIN) if AGAIN in works else None,
        "rate_ratio_95": median_within(timings, OWN, IDLE),
        **({"again_ratio_95": median_within(timings, OWN, AGAIN)} if AGAIN in works else {}),
        "recorded": recorded,
        "left_on_the_base": second.on_the_base() - one.tenants,
        "gib": {
            "used": used / 2**30,
            "idle": second.memory_bytes() / 2**30,
            "without": setup.served.memory_bytes() / 2**30,
        },
    }


def median_within(timings: Timings, name: str, to: str) -> list[float] | None:
    """Bounds within which the median of the ratios of rounds lies, with 95 % confidence: two of the ratios, by their order.
    None of fewer than six rounds, which allow none."""
    above, below = timings.by_name[name], timings.by_name[to]
    if above.error or below.error or len(above.ms) < 6:
        return None
    ratios = sorted(a / b for a, b in zip(above.ms, below.ms, strict=True))
    at = int((len(ratios) - 1.96 * len(ratios) ** 0.5) / 2)
    return [ratios[at], ratios[-1 - at]]


# --- latency -----------------------------------------------------------------------------------------------------------------


def measure_latency(one: Case, names: list[str], setup: Setup) -> Row:
    """One forward_backward from its sending to its result, and the engine's time for it in this process."""
    (tenant,), (sample,) = setup.served.models(1, RANK, 1001), setup.samples(1, one.tokens, 0)
    request = request_of([sample])
    works = {OWN: lambda: _finite(tenant.loss(tenant.send(request)))}
    if ENGINE in names:
        works[ENGINE] = engine_work(setup, request)
    row, _ = _timed(works, names, one)
    return row


def _finite(loss: float) -> None:
    assert np.isfinite(loss)


class OneSlot:
    """A slot, and then none."""

    def __init__(self, slot: Slot) -> None:
        self._left = [slot]

    def next(self) -> Slot | None:
        return self._left.pop() if self._left else None

    def peek(self) -> Parts:
        return ()

    def is_asked(self) -> bool:
        return False


def engine_work(setup: Setup, request: Any) -> Callable[[], None]:
    """A forward and backward of a request's rows by an engine in this process, as the service runs it, until its losses have
    come."""
    host = Host("base", run_of(str(setup.base), [f"device={setup.device.type}"], None, setup.folder), 8192)
    wanted = Wanted({"r": RANK, "lora_alpha": 32.0, "target_modules": TARGETS}, {}, 0)
    adapter = host.attach("model", wanted.spec(host.skeleton, host.facts.path), 0)
    host.train(adapter, AdapterState(adapter, FIRST, 1))
    limits = Limits()
    found = read_forward_backward(request, limits)
    work = work_of(found, host.facts.vocabulary, host.facts.context, limits.targets)

    def run() -> None:
        part = Part(adapter.number, [EngineRow(sample) for sample in work.samples], work.objective, facts=FACTS)
        slot = Slot([part], frozenset([adapter.number]), wants_losses=True)
        (done,) = host.engine.run(OneSlot(slot))
        assert done.losses_L is not None and bool(done.losses_L.isfinite().all())

    return run


MEASURES: dict[str, Callable[[Case, list[str], Setup], Row]] = {
    "tenants": measure_tenants, "one": measure_one, "idle": measure_idle, "latency": measure_latency,
}  # fmt: skip


def serve_summary(rows: list[Row]) -> Row:
    """Ratios, medians of those within a round; a latency over the engine's is a ratio of medians."""
    out: Row = {}
    for row in rows:
        ratios, rates = row.get("over_packlora", {}), row.get("tokens_per_s", {})
        if row["what"] == "tenants":
            found = {row["key"]: ratios.get(SEQUENTIAL)}
            found |= {"mixed_vs_set_adapter": ratios.get(PEFT)} if row["case"].endswith("250") else {}
            suffix = row["case"].split()[1]
            found |= {f"{name}_{suffix}_tokens_per_s": rate for name, rate in rates.items()}
        elif row["what"] == "one":
            found = {"one_tenant_over_train": row.get("over_train")}
            found |= {f"one_tenant_{name}_tokens_per_s": rate for name, rate in rates.items()}
        elif row["what"] == "idle":
            found = {
                "idle_models_tokens_per_s": row["rate_ratio"],
                "idle_models_gib": row["gib"]["idle"] - row["gib"]["without"],
                "idle_models_again_tokens_per_s": row.get("over_again"),
            }
        else:
            found = {f"p50_{name}_ms": ms for name, ms in row["ms"].items()}
            found["p50_small_over_compute"] = row["ms"][OWN] / row["ms"][ENGINE] if ENGINE in row["ms"] else None
        out |= {key: value for key, value in found.items() if value is not None}
    return out


SERVE = Benchmark(
    serve_cases, measure_serve, serve_summary,
    "`packlora serve --max-wait-ms 0` in a process of its own, its clients over HTTP by the wire format (protobuf, JSON, held "
    "requests; no public client), a thread and a connection a tenant. Random weights of Qwen3-0.6B's shape in bfloat16 on a "
    "GPU; on a CPU in float32, cut to 2 layers of width 256 and 1008 words. LoRA r 16, alpha 32, on all linear layers but the "
    "output, AdamW. A tenant sends forward_backward and optim_step of a step, and those of the next one before it waits for "
    "the results. Contenders run in turn in one loop, the order drawn anew in each round; ratios are medians over rounds of "
    "the ratio within a round. tenants 64 / 250: tenants, samples a step and tokens a sample as the rows say; packlora: all "
    "tenants at once, on a GPU after runs until ten of them recorded no size; sequential: the same service, one tenant after "
    "the other; set_adapter (of 250): one PEFT model with as "
    "many adapters, set_adapter for each tenant, bfloat16 on a GPU and float32 on a CPU, fused AdamW, liger-kernel where it is "
    "installed, a step's samples in one batch. one tenant: seconds per token of a tenant whose rows fill microbatches over "
    "those of `packlora train` by its command, each the median time between ends of steps, the first two left out; a run of "
    "each in turn. idle models: all tenants at once on a service with idle models, over that on one without; they took a step "
    f"each and were then left alone, beside working tenants, until they had left the device (after {IDLE_SECONDS:.0f} s, their "
    f"seats {SEAT_SECONDS:.0f} s later); rate_ratio_95: where the median of rounds lies, with 95 % confidence; over_again, "
    "again_ratio_95: the same of a third service, also without idle models; gib: "
    "memory of tensors on the device (on a CPU: of the process) with idle models minus that of the service without. latency "
    "datum: from sending a forward_backward of one sample to its result, median, over the median time of the engine in the "
    "benchmark's process for the same rows.",
    [OWN, SEQUENTIAL, PEFT, TRAIN, IDLE, AGAIN, ENGINE], by_case=True, where="any",
)  # fmt: skip
