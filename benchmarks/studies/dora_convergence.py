"""Does DoRA train under packlora as it does under PEFT? Loss by loss over a thousand steps and several seeds.

    python -m benchmarks dora-convergence --out dora-convergence-h200.json --data python \\
        --steps 2000 --seeds 2
    python -m benchmarks dora-convergence --out benchmarks/results/dora-convergence-cpu.json --device cpu \\
        --steps 60 --seeds 1

The same loop runs over a PEFT model as it is and after packlora.accelerate: same base, same initial adapter, same samples in
the same order. A third run is PEFT's with the samples of each batch in reverse order: the same numbers but for the order in
which they are summed, so what it differs by is noise. Runs may be made one by one (--ways).
On a GPU a whole training step is one CUDA graph, for both alike: SmolLM2-135M keeps the host busy and the GPU idle, and PEFT's
step takes the host 100 ms. The graphs of all runs are replayed at once, on streams of their own: one of PEFT's is a chain of
thousands of kernels that are too small for the GPU. Each of them keeps the memory of a step; where that is too much, --ways.
Where a capture fails, that way trains step by step beside the others; where a graph does not compute what the same step does
without it, that way trains again after the others, step by step. The results say so.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import check_writable, device_slug, write_results
from benchmarks.studies.dora_fidelity import RANK, load_base, padded, samples, with_adapter
from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.files import write_json
from packlora.live.accelerate import accelerate
from packlora.runtime.memory import synchronize
from packlora.runtime.record import device_name

NOISE = "peft_reversed"
"""PEFT again, the samples of each batch in reverse order: the same sums in another order."""
WAYS = ("peft", "packlora", NOISE)
EXACT = "peft_fp32"
"""PEFT again, all in float32."""
NOTHING = "none"
"""In the place of ways: only the comparison of what earlier runs left."""
LR, CLIP = 2e-4, 1.0
EVAL_SAMPLES = 24
CHUNK = 10
"""Steps between two looks at the clock."""
SAVED = 100
"""Steps between two writings of the losses, for whoever has to end this; a multiple of CHUNK."""
WARM_UP = 4
CHECKED = (0, 1, 3, 10, 30, 100, 300, 600)
"""Steps, beside the last, at which a graph's loss is compared with the loss without it."""
GRAPH_GAP = 2e-2
"""Largest difference there. None is expected; were other kernels at work, bfloat16's roundings would make one with a deviation
of 2.7e-3 (of PEFT's loss to packlora's on 8 samples and the same parameters, on a CPU)."""
PROTOCOL = (
    "{model}; DoRA r {rank}, alpha {alpha} on all linear layers, no dropout; {precision}; AdamW, lr {lr}, clipping at "
    "{clip}, {steps} steps of {batch} samples of {data}, order drawn by seed; {seeds} seeds. Three runs per seed of one "
    "loop over a PEFT model from the same initial adapter: as it is, after packlora.accelerate, and as it is with the "
    "samples of each batch in reverse order, which changes the order of sums alone. mean_abs, max_abs: of the difference of"
    " packlora's and PEFT's losses per step; mean_signed: packlora's less PEFT's; noise: of PEFT's two runs; over_noise: "
    "mean_abs over noise_mean_abs, means over seeds; eval: mean loss on {eval} held-out samples after the last step; "
    "to_fp32: to a fourth run, PEFT's all in float32 from the same numbers, over the steps_to_fp32 that it did; seconds: of "
    "all steps of all runs that trained in turn with this one. {device}."
)
DATA = {
    "synopses": "debian_synopsis/train, {rows} of them (prompt and completion, cut at {length} tokens, padded to it)",
    "python": "the source of Python {version}'s standard library ({rows} samples of {length} tokens)",
}
NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
"""Folders of the standard library that are not of it, or not everywhere."""
SIDE_BY_SIDE = (
    "One GPU. At once, in one process, a step of each run in turn: {together}; each of PEFT's runs has a stream of its own, "
    "packlora's share one. As CUDA graphs: {graphs}; a whole step, from the forward to the optimizer, is captured once and "
    "replayed, after warm-up steps that are undone. graph_gap: largest difference of a graph's loss to that of the same "
    "parameters without the graph, at up to {checks} of the steps"
)


class WrongGraph(RuntimeError):
    """A CUDA graph's loss is not that of its parameters."""


class Lane:
    """A stream of a GPU, and the memory of the graphs on it, which are replayed one after the other and leave a loss alone."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()


# --- one model in training -----------------------------------------------------------------------------------------------


class Trainee:
    """A model in training on its samples, and its losses so far.

    Args:
        way: one of WAYS, or EXACT.
        base: in float32; used up.
        rows: token ids of the training samples.
        narrow: the base is rounded to bfloat16, and all but EXACT run under autocast; by default on a GPU.
        dora: else LoRA.
        lane: where it trains on a GPU; by default the current stream, which cannot be captured.

    Raises:
        AssertionError: a module was left to PEFT.
    """

    def __init__(
        self, way: str, seed: int, base: Any, rows: list[list[int]], device: torch.device, args: argparse.Namespace,
        narrow: bool | None = None, dora: bool = True, lane: Lane | None = None,
    ) -> None:  # fmt: skip
        self.device, on_gpu = device, device.type == "cuda"
        self.lane, self.stream = lane, lane.stream if lane else None
        narrow = on_gpu if narrow is None else narrow
        self.mixed = narrow and way != EXACT
        torch.manual_seed(seed)
        if narrow:
            cast(base, torch.bfloat16)
        self.model = with_adapter(base.to(device), args.rank, wide=True, dora=dora)
        if way == EXACT:
            cast(self.model, torch.float32)
        if way == "packlora":
            report = accelerate(self.model)
            assert report.accelerated == len(report.modules), f"not all modules were accelerated: {report}"
        self.model.train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0, capturable=on_gpu)
        self.batches = batches(rows, seed, args, device)
        if way == NOISE:
            self.batches = {name: every.flip(1) for name, every in self.batches.items()}
        self.inputs = {name: every[0].clone() for name, every in self.batches.items()}
        self.losses = torch.zeros(args.steps, device=device)
        self.done, self.steps = 0, args.steps
        self.graph_gap = 0.0
        self.eval: float | None = None
        self._replay: Callable[[], None] | None = None
        self._graph_loss: torch.Tensor | None = None

    def loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            loss: torch.Tensor = self.model(**inputs, use_cache=False).loss
        return loss

    def step(self) -> torch.Tensor:
        """One step on `inputs`; the loss before it."""
        loss = self.loss(self.inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()  # no gradients: a graph makes them anew at each replay
        return loss.detach()

    def capture(self) -> None:
        """Steps are replays of a CUDA graph from now on."""
        with torch.cuda.stream(self.stream):
            self._replay, self._graph_loss = captured(self.step, self._warm_up, self.lane)

    def _warm_up(self) -> None:
        """Some steps, which are undone: what is made at first calls, such as tables, is there before the capture."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        for _ in range(WARM_UP):
            self.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, before)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def advance(self) -> None:
        """One more step on the own stream, which the host waits for only where a graph is checked.

        Raises:
            WrongGraph: a graph's loss is not that of its parameters.
        """
        number = self.done
        with torch.cuda.stream(self.stream):
            for name, into in self.inputs.items():
                into.copy_(self.batches[name][number])
            if self._replay is None:
                self.losses[number] = self.step()
            else:
                plain = self._loss_without_graph() if number in CHECKED or number == self.steps - 1 else None
                self._replay()
                assert self._graph_loss is not None
                self.losses[number] = self._graph_loss
                if plain is not None:
                    self._check(number, plain)
        self.done += 1

    def _loss_without_graph(self) -> torch.Tensor:
        torch.autograd.graph.increment_version(self.parameters)  # replays move no version counters
        return self.loss(self.inputs).detach()  # with gradients, as in a step, so by the same kernels

    def _check(self, number: int, plain: torch.Tensor) -> None:
        gap = abs(float(self.losses[number]) - float(plain))
        if not gap <= GRAPH_GAP:
            raise WrongGraph(
                f"step {number}: the graph's loss is {float(self.losses[number])}, without the graph {float(plain)}; "
                f"accepted is a difference of {GRAPH_GAP}"
            )
        self.graph_gap = max(self.graph_gap, gap)

    def evaluate(self, held_out: list[list[int]], length: int) -> None:
        """Of samples that are not trained on, the mean loss into the record."""
        if self._replay is not None:
            torch.autograd.graph.increment_version(self.parameters)
        with torch.cuda.stream(self.stream), torch.no_grad():
            parts = [self.loss(padded(held_out[at : at + 8], self.device, length)) for at in range(0, len(held_out), 8)]
            self.eval = float(torch.stack(parts).mean())

    def record(self) -> dict[str, Any]:
        graph = {} if self._replay is None else {"graph_gap": self.graph_gap}
        return {"losses": self.losses[: self.done].tolist(), "eval": self.eval, **graph}


def training_rows(args: argparse.Namespace, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the samples to train on, and of those held out."""
    if args.data == "synopses":
        return tuple(  # type: ignore[return-value]
            samples(file, count, args.length, tokenizer)
            for file, count in (("train.jsonl", args.rows), ("eval.jsonl", EVAL_SAMPLES))
        )
    rows = source_rows(args.rows + EVAL_SAMPLES, args.length, tokenizer)
    return rows[:-EVAL_SAMPLES], rows[-EVAL_SAMPLES:]


def source_rows(count: int, length: int, tokenizer: Any) -> list[list[int]]:
    """Pieces of `length` tokens of the standard library's source, file after file, at most `count`: 11 MB of text, which a
    thousand steps see a few times, where they would learn the synopses by heart. Without a tokenizer, bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not NO_SOURCE & set(path.relative_to(root).parts)]
    rows: list[list[int]] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        ids = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
        rows += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        if len(rows) >= count:
            break
    return rows[:count]


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone, as from_pretrained(dtype=...) does: the rotary embeddings' frequencies are buffers and stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def batches(
    rows: list[list[int]], seed: int, args: argparse.Namespace, device: torch.device
) -> dict[str, torch.Tensor]:
    """Of all steps: input_ids, attention_mask and labels, [steps, batch, length]."""
    order = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    every = []
    for _ in range(args.steps):
        while len(queue) < args.batch:
            queue += torch.randperm(len(rows), generator=order).tolist()
        chosen, queue = queue[: args.batch], queue[args.batch :]
        every.append(padded([rows[number] for number in chosen], torch.device("cpu"), args.length))
    return {name: torch.stack([batch[name] for batch in every]).to(device) for name in every[0]}


def captured(
    step: Callable[[], torch.Tensor], warm_up: Callable[[], None], lane: Lane | None
) -> tuple[Callable[[], None], torch.Tensor]:
    """What replays `step` as a CUDA graph, and the loss that a replay writes; warm_up runs first. To be called on the lane."""
    assert lane is not None
    warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=lane.pool, stream=lane.stream):
        loss = step()
    lane.stream.synchronize()
    return graph.replay, loss


# --- all seeds of some ways ----------------------------------------------------------------------------------------------


class Seeds:
    """The runs of one way, one of each seed.

    Args:
        make: the Trainee of a seed.
        graph: capture all of them.
    """

    def __init__(self, way: str, make: Callable[[str, int], Trainee], seeds: int, graph: bool) -> None:
        self.way, self.graph = way, graph
        self.failure: Exception | None = None
        self.trainees: list[Trainee] = []
        for seed in range(seeds):
            self.trainees.append(make(way, seed))
            if graph:
                self.trainees[-1].capture()
        print(f"{way}: {seeds} models ready, {'as CUDA graphs' if graph else 'step by step'}", flush=True)

    def attempt(self, work: Callable[[Seeds], None]) -> None:
        """Do this, or nothing after a failure: that of one way must not end the others."""
        try:
            if self.failure is None:
                work(self)
        except Exception as error:
            traceback.print_exc()
            self.failure = error

    def advance(self) -> None:
        for trainee in self.trainees:
            trainee.advance()

    def evaluate(self, held_out: list[list[int]], length: int) -> None:
        for trainee in self.trainees:
            trainee.evaluate(held_out, length)

    def save(self, out: Path, common: dict[str, Any]) -> None:
        write_json(part(out, self.way), self.record(common))

    def record(self, common: dict[str, Any]) -> dict[str, Any]:
        return common | {"graph": self.graph, "runs": [trainee.record() for trainee in self.trainees]}


def ready(way: str, make: Callable[[str, int], Trainee], seeds: int, graphs: bool) -> Seeds | None:
    """Before the first step; without graphs where a capture fails, None where that fails, too."""
    for graph in [True, False] if graphs else [False]:
        try:
            return Seeds(way, make, seeds, graph)
        except Exception:
            traceback.print_exc()
            print(f"{way}, {'as CUDA graphs' if graph else 'step by step'}: failed", flush=True)
    return None


def train(
    ways: Sequence[str], device: torch.device, args: argparse.Namespace, end: float, graphs: bool
) -> dict[str, Any]:
    """Train with some of WAYS and EXACT, a step of every run in turn, until the steps are done or the clock is at `end`; CHUNK
    steps at least. A way whose graph computes something else trains again after the others, step by step.

    Returns:
        By way what its runs gave, without the ways that failed. It is in the file part(args.out, way) every SAVED steps and
        in the end.
    """
    for way in ways:
        part(args.out, way).unlink(missing_ok=True)
    base, tokenizer, words = load_base(args.random_weights, args.tiny)
    rows, held_out = training_rows(args, tokenizer)
    shared = Lane(device) if device.type == "cuda" else None

    def make(way: str, seed: int) -> Trainee:
        # layers of packlora's may share temporary buffers, so its runs follow each other
        lane = shared if shared is None or way == "packlora" else Lane(device)
        with torch.cuda.stream(lane.stream if lane else None):
            return Trainee(way, seed, copy.deepcopy(base), rows, device, args, lane=lane)

    every = [seeds for way in ways if (seeds := ready(way, make, args.seeds, graphs)) is not None]
    common: dict[str, Any] = {
        "model": words, "rows": len(rows), "origin": origin(device, args), "done": False,
        "together": [seeds.way for seeds in every],
    }  # fmt: skip
    start = time.perf_counter()
    for number in range(args.steps + 1):
        if number == args.steps or number % CHUNK == 0:
            synchronize(device)  # else the clock says when steps were asked for
            common["seconds"] = time.perf_counter() - start
            over = number == args.steps or (number > 0 and time.monotonic() >= end)
            if over or (number > 0 and number % SAVED == 0):
                print(f"{number} steps of {', '.join(common['together'])}: {common['seconds']:.1f} s", flush=True)
                for seeds in every:
                    seeds.attempt(lambda seeds: seeds.save(args.out, common))
            if over:
                break
        for seeds in every:
            seeds.attempt(Seeds.advance)
    common["done"] = True
    for seeds in every:
        seeds.attempt(lambda seeds: seeds.evaluate(held_out, args.length))
        seeds.attempt(lambda seeds: seeds.save(args.out, common))
    records = {seeds.way: seeds.record(common) for seeds in every if seeds.failure is None}
    if wrong := [seeds.way for seeds in every if isinstance(seeds.failure, WrongGraph)]:
        print(f"{', '.join(wrong)}: again, step by step", flush=True)
        records |= train(wrong, device, args, end, graphs=False)
    return records


def part(out: Path, way: str) -> Path:
    """Where one way's losses are while the whole is not done."""
    return out.with_name(f"{out.stem}.{way}.json")


def train_all(ways: Sequence[str], device: torch.device, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """What train() gives: all ways side by side on a GPU, one after the other on a CPU, which share the time."""
    if device.type == "cuda":
        return train(ways, device, args, end, graphs=not args.eager)
    records: dict[str, Any] = {}
    for number, way in enumerate(ways):
        now = time.monotonic()
        records |= train((way,), device, args, now + (end - now) / (len(ways) - number), graphs=False)
    return records


def origin(device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """What two ways must have in common to be compared."""
    return {"settings": settings(args), "device": device_name(device), "python": platform.python_version()}


def recorded(way: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """What an earlier run with this --out left of a way. Raises InputError where it belongs to something else, or was ended and
    is not asked for."""
    path, wanted = part(args.out, way), origin(device, args)
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("origin") != wanted:
        raise InputError(f"{path} is of {record.get('origin')}, not of {wanted}; remove it, or run {way} again")
    if not record["done"] and args.ways != NOTHING:
        raise InputError(
            f"{path} is of a run that was ended; remove it, run {way} again, or compare what there is: --ways={NOTHING}"
        )
    return record


def settings(args: argparse.Namespace) -> list[str]:
    """The options that runs must have in common to be compared."""
    names = ("device", "steps", "seeds", "batch", "length", "data", "rows", "rank")
    words = [f"--{name}={getattr(args, name)}" for name in names]
    return words + [f"--{name.replace('_', '-')}" for name in ("random_weights", "tiny") if getattr(args, name)]


# --- the comparison ------------------------------------------------------------------------------------------------------


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """Of losses, of the steps that both did."""
    return [abs(one - other) for one, other in zip(a["losses"], b["losses"], strict=False)]


def compared(
    seed: int, peft: dict[str, Any], ours: dict[str, Any], again: dict[str, Any], exact: dict[str, Any] | None
) -> dict[str, Any]:
    """One seed's row, over the steps that all did; no figures of eval where one did more. again: NOISE."""
    steps = min(len(run["losses"]) for run in (peft, ours, again))
    gaps, noise = (differences(run, peft)[:steps] for run in (ours, again))
    worst = max(range(steps), key=gaps.__getitem__)
    tenth = max(steps // 10, 1)
    row = {
        "case": f"seed {seed}", "steps": steps, "mean_abs": sum(gaps) / steps, "max_abs": gaps[worst],
        "max_abs_step": worst, "noise_mean_abs": sum(noise) / steps, "noise_max_abs": max(noise),
        "mean_signed": sum(ours["losses"][:steps]) / steps - sum(peft["losses"][:steps]) / steps,
        "first_loss": peft["losses"][0],
        "last_tenth_loss": sum(peft["losses"][steps - tenth : steps]) / tenth,
        "eval_peft": peft["eval"], "eval_packlora": ours["eval"], "eval_abs": None,
        "graph_gap": {way: run.get("graph_gap") for way, run in zip(WAYS, (peft, ours, again), strict=True)},
        "losses_peft": peft["losses"], "losses_packlora": ours["losses"], f"losses_{NOISE}": again["losses"],
    }  # fmt: skip
    if len(peft["losses"]) == len(ours["losses"]) and None not in (peft["eval"], ours["eval"]):
        row["eval_abs"] = abs(ours["eval"] - peft["eval"])
    if exact is not None:
        both = min(steps, len(exact["losses"]))
        row["steps_to_fp32"], row["losses_fp32"] = both, exact["losses"]
        for way, run in (("peft", peft), ("packlora", ours)):
            row[f"mean_abs_{way}_to_fp32"] = sum(differences(run, exact)[:both]) / both
            row[f"mean_signed_{way}_to_fp32"] = (sum(run["losses"][:both]) - sum(exact["losses"][:both])) / both
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: the fewest steps of one, mean and largest loss difference per step, the same of PEFT's two runs, largest
    difference on held-out samples."""
    evals = [row["eval_abs"] for row in rows]
    out = {
        "convergence_steps": min(row["steps"] for row in rows),
        "convergence_mean_abs": sum(row["mean_abs"] for row in rows) / len(rows),
        "convergence_max_abs": max(row["max_abs"] for row in rows),
        "convergence_eval_abs": None if None in evals else max(evals),
        "convergence_noise_mean_abs": sum(row["noise_mean_abs"] for row in rows) / len(rows),
        "convergence_noise_max_abs": max(row["noise_max_abs"] for row in rows),
    }
    noise = out["convergence_noise_mean_abs"]
    out["convergence_over_noise"] = out["convergence_mean_abs"] / noise if noise else None
    for key in ("mean_abs_peft_to_fp32", "mean_abs_packlora_to_fp32"):
        if all(key in row for row in rows):
            out[f"convergence_{key}"] = sum(row[key] for row in rows) / len(rows)
    return out


def write(records: dict[str, Any], device: torch.device, args: argparse.Namespace) -> None:
    """The results file, out of what there is of each way."""
    peft, ours, again = (records[way]["runs"] for way in WAYS)
    exact = records[EXACT]["runs"] if EXACT in records else [None] * args.seeds
    rows = [compared(seed, peft[seed], ours[seed], again[seed], exact[seed]) for seed in range(args.seeds)]
    for row in rows:
        row["seconds"] = {way: record["seconds"] for way, record in records.items()}
        row["random_weights"] = args.random_weights or args.tiny
        print({key: value for key, value in row.items() if not key.startswith("losses")}, flush=True)
    figures = summary(rows)
    precision, where = "float32", "CPU, one way after the other, a step of each of its seeds in turn"
    if device.type == "cuda":
        precision = "bfloat16 base, float32 adapters under torch.autocast"
        graphs = ", ".join(way for way, record in records.items() if record["graph"]) or "none"
        together = "; then ".join(dict.fromkeys(", ".join(record["together"]) for record in records.values()))
        where = SIDE_BY_SIDE.format(together=together, graphs=graphs, checks=len(CHECKED) + 1)
    done = f"{figures['convergence_steps']}"
    if figures["convergence_steps"] < args.steps:
        done += f" (of {args.steps} that were asked for)"
    protocol = PROTOCOL.format(
        model=records["peft"]["model"], rank=args.rank, alpha=2 * args.rank, precision=precision, lr=LR, clip=CLIP,
        steps=done, batch=args.batch, seeds=args.seeds, eval=EVAL_SAMPLES, device=where,
        data=DATA[args.data].format(length=args.length, rows=records["peft"]["rows"], version=platform.python_version()),
    )  # fmt: skip
    write_results(args.out, f"dora-convergence-{device_slug(device)}", protocol, rows, figures, str(device))


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--data", choices=DATA, default="synopses")
    parser.add_argument("--rows", type=int, default=100000, help="of the training set, at most")
    parser.add_argument(
        "--ways",
        help="some of them alone, with commas; the results are written when all have been run. none: out of what is there",
    )
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--exact", action="store_true", help="also PEFT in float32, to measure both against")
    parser.add_argument("--seconds", type=float, help="training ends then, at the steps that were done")
    parser.add_argument("--eager", action="store_true", help="step by step on a GPU too")
    parser.add_argument(
        "--random-weights", action="store_true", help="SmolLM2-135M's shape where its weights are not at hand"
    )
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    check_writable(args.out)
    device = choose_device(args.device)
    end = time.monotonic() + (args.seconds or math.inf)
    wanted = () if args.ways == NOTHING else tuple(dict.fromkeys(args.ways.split(","))) if args.ways else WAYS
    if not set(wanted) <= set(WAYS):
        raise InputError(f"ways: {args.ways!r}; accepted are {', '.join(WAYS)}, separated by commas, or {NOTHING}")
    wanted += (EXACT,) if args.exact else ()
    left = [way for way in (*WAYS, EXACT) if way not in wanted]
    earlier = {way: recorded(way, device, args) for way in left if part(args.out, way).exists()}
    records = earlier | (train_all(wanted, device, args, end) if wanted else {})
    if failed := [way for way in wanted if way not in records]:
        print(f"{', '.join(failed)}: failed", flush=True)
    if missing := [way for way in WAYS if way not in records]:
        if failed:
            raise RuntimeError(f"no results: the runs with {', '.join(failed)} failed; what the others gave is kept")
        print(f"{', '.join(records)}: done; the results follow when {', '.join(missing)} is run with the same --out")
        return
    write(records, device, args)
    for way in (*WAYS, EXACT):
        part(args.out, way).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
