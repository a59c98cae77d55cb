"""`packlora tune`: measure the kernels' sizes (kernels.py), then the plans for what a run will meet, or for usual shapes, and
remember both for this device."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from packlora.adapters.kinds import sizes
from packlora.adapters.siblings import sibling_groups
from packlora.adapters.spec import AdapterSpec
from packlora.base.device import choose_device, settle_dtype
from packlora.base.load import load_skeleton
from packlora.base.packing import ATTENTION
from packlora.config import Run
from packlora.engine.memory import synchronize
from packlora.errors import InputError
from packlora.ops.lora_linear.plan import CHAIN, Plan, ordered
from packlora.plans.cache import PlanCache, Record, fastest
from packlora.plans.case import Case, token_bucket
from packlora.plans.cost import machine, seconds
from packlora.plans.space import legal_plans
from packlora.report.progress import duration
from packlora.report.screen import Screen, table_screen
from packlora.runtime.head_cost import remember
from packlora.runtime.prepare import adapter_config, adapter_spec
from packlora.runtime.prepared_job import AUTO_BUDGET, ModelShape
from packlora.tune.head import measure_head
from packlora.tune.kernels import tune_sizes
from packlora.tune.measure import FAR, Make, candidates, group_maker, measure, with_earlier

SMALLEST = 8
"""Microbatches are measured from this part of the largest one upwards; of a full schedule few are smaller."""

TRACED = 8
"""Tokens of the forward that finds the groups; any number works."""

MINUTES = 5.0
"""Default limit of the measuring time, in minutes."""

UNCOUNTED, COUNTED = 5, (9, 100)
"""Runs of every plan before the counted rounds, as timing.paired has them, and the fewest and most of these."""

PART = 0.1
"""Largest share of the time for one case: a slow case is measured with fewer plans."""

GPU_SHAPES = ((4096, 4096), (5120, 5120), (8192, 8192), (4096, 14336), (14336, 4096))
GPU_GROUPS = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)))
CPU_GROUPS = ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,)))
"""(K, Ns): single layers and groups of common models; on a CPU those of SmolLM2-135M."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Tuning result of one case: the fastest plan, its time and the plain chain's in milliseconds; or the reason why there is
    none."""

    case: Case
    measured: Record
    plan: Plan | None

    @property
    def speedup(self) -> float | None:
        """Time of the plain chain over that of the plan."""
        if self.plan is None:
            return None
        return self.measured.ms[CHAIN.name] / self.measured.ms[self.plan.name]


# --- which cases -------------------------------------------------------------------------------------------------------


def standard_cases(device: torch.device) -> list[Case]:
    """Usual layers at rank 16 with and without dropout, and four adapters of ranks 8 to 64 at once, large batches first."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    groups = (*((K, (N,)) for K, N in GPU_SHAPES), *GPU_GROUPS) if gpu else CPU_GROUPS
    out = []
    for tokens in (8192, 2048) if gpu else (2048, 512):
        for ranks, drops in (((16,), (True,)), ((16,), (False,)), ((8, 16, 32, 64), (False, True, True, True))):
            for K, Ns in groups:
                by_adapter = [[rank] * len(Ns) for rank in ranks]
                out.append(Case.of(device, dtype, tokens, K, Ns, by_adapter, drops, [False] * len(Ns)))
    return out


def cases_of_run(run: Run, device: torch.device) -> tuple[list[Case], list[str]]:
    """The cases of a run file, without its weights or data: every group of adapted layers, with each job alone and all jobs
    together, in microbatches from an eighth of the largest up. The most useful ones first: the largest microbatches, as most
    are; all jobs together; what most time goes to, by the number of layers and the estimate for one. Second: what the user
    should know.

    Raises:
        InputError: the model, an adapter or its targets are wrong.
    """
    settle_dtype(run)
    skeleton = load_skeleton(run)
    specs = {job.name: adapter_spec(job, adapter_config(job, run), skeleton) for job in run.jobs}
    adapted = [
        name for name, _ in skeleton.named_modules() if any(_rank(spec, name) for spec in specs.values())
    ]  # in model order
    groups, first, notes = _groups(skeleton, adapted)
    budget = run.max_tokens_per_microbatch
    tokens = _buckets(AUTO_BUDGET[device.type] if budget == "auto" else int(budget))
    mixes = [[name] for name in specs] + ([list(specs)] if len(specs) > 1 else [])
    out: dict[Case, int] = {}
    layers_of: Counter[Case] = Counter()
    for group in groups:
        layers = [skeleton.get_submodule(name) for name in group]
        for mix in mixes:
            chosen = [specs[name] for name in mix]
            modules = [spec.modules[name] for spec in chosen for name in group if _rank(spec, name)]
            if not modules:
                continue
            drops = [any(_rank(spec, name) and spec.modules[name].dropout for name in group) for spec in chosen]
            for number in tokens:
                case = Case.of(
                    device,
                    getattr(torch, run.dtype),
                    number,
                    sizes(layers[0])[1],
                    [sizes(layer)[0] for layer in layers],
                    [[_rank(spec, name) for name in group] for spec in chosen],
                    [bool(drop) for drop in drops],
                    [layer.bias is not None for layer in layers],
                    needs=(not first.issuperset(group), True, True),
                    composed=any(module.use_dora or module.train_bias for module in modules),
                    base_dropped=run.compute != "dora_fp8"
                    and any(module.use_dora and module.dropout and module.base_dropped for module in modules),
                )
                out[case] = max(out.get(case, 1), len(mix))
                layers_of[case] += 1
    roofline = machine(device, run.dtype, next(iter(out)).tf32) if out else None

    def usefulness(case: Case) -> tuple[float, ...]:
        assert roofline is not None
        return case.tokens, out[case], layers_of[case] * seconds(CHAIN, case, roofline)

    return sorted(out, key=usefulness, reverse=True), notes


def _rank(spec: AdapterSpec, name: str) -> int:
    """Rank of a linear layer that the operator computes; 0 for other layers."""
    return spec.modules[name].rank if name in spec.modules and spec.modules[name].kind == "linear" else 0


def _buckets(largest: int) -> list[int]:
    """Token buckets from largest / SMALLEST to that of `largest`, the largest first."""
    every = {token_bucket(tokens) for power in range(largest.bit_length() + 1) for tokens in (1 << power, 3 << power)}
    top = token_bucket(largest)
    return sorted((tokens for tokens in every if top // SMALLEST <= tokens <= top), reverse=True)


def _groups(skeleton: PreTrainedModel, adapted: Sequence[str]) -> tuple[list[tuple[str, ...]], set[str], list[str]]:
    """Groups of the adapted layers in model order, those whose input needs no gradient (nothing trained is before them), and a
    note where the model cannot be traced without its weights."""
    ids, positions = (torch.zeros(1, TRACED, dtype=torch.long, device="meta") for _ in range(2))
    example = {"input_ids": ids, "position_ids": positions, "use_cache": False, "sample_lengths": (TRACED,)}
    skeleton.set_attn_implementation(ATTENTION)  # it makes no mask, which could not be made without numbers
    first: set[str] = set()
    skeleton.requires_grad_(False)
    with ExitStack() as hooks:
        for path in adapted:

            def note(_: torch.nn.Module, args: tuple[torch.Tensor, ...], path: str = path) -> None:
                if args and not args[0].requires_grad:
                    first.add(path)

            module = skeleton.get_submodule(path)
            module.weight.requires_grad_(True)
            hooks.enter_context(module.register_forward_pre_hook(note))
        try:
            skeleton(**example)
        except Exception as error:  # a model may do anything in its forward
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            return [(path,) for path in adapted], set(), [f"layers are measured one by one, not in groups: {reason}"]
    found = sibling_groups(skeleton, adapted, example)
    group_of = {path: group for group in found for path in group}
    return list(dict.fromkeys(group_of.get(path, (path,)) for path in adapted)), first, []


# --- measuring them ----------------------------------------------------------------------------------------------------


def tune(
    run: Run | None = None,
    device: torch.device | None = None,
    progress: bool = True,
    minutes: float = MINUTES,
    budget_s: float = 1.0,
    cache: PlanCache | None = None,
    lossy: bool = False,
) -> list[Tuned]:
    """Measure, store after every case, print a table. What was not measured before comes first, then what was the longest ago.

    Args:
        run: whose cases; None for the standard ones.
        device: by default the run's, or the first GPU, or the CPU.
        progress: show a bar.
        minutes: end after this time; at least one case is measured.
        budget_s: seconds of counted rounds per case.
        cache: where to store; by default the device's own file.
        lossy: measure plans that merge weights too, for those who allow them (ask.Ask), as a run with plans.lossy does.

    Raises:
        InputError: bad input, or the cache cannot be written.
    """
    if not 0 <= minutes < math.inf:
        raise InputError(f"minutes is {minutes:g}; give a number from 0 on")
    device, lossy = (
        device or choose_device(run.device if run else "auto"),
        lossy or (run is not None and run.plans.lossy),
    )
    cases, notes = cases_of_run(run, device) if run else (standard_cases(device), [])
    console = table_screen()
    minutes -= min(
        minutes, tune_sizes(device, minutes, console)
    )  # plans are measured with the sizes that they will have
    if run is not None and run.parallel.stages > 1:
        _tune_head(run, device, console)
    cache = cache or PlanCache(device)
    several = [case for case in cases if len(legal_plans(case, lossy)) > 1]
    if len(several) < len(cases):
        notes.append(f"{len(cases) - len(several)} cases have one plan, the plain chain (DoRA), and are not measured")
    several.sort(key=lambda case: known.date if (known := cache.get(case.key)) is not None else "")
    console.print(
        f"measuring plans for {len(several)} cases, the most useful first, in at most {minutes:.3g} minutes",
        soft_wrap=True,
    )
    out = _measured(several, device, Budget(60 * minutes, budget_s, lossy), cache, console, progress)
    console.print(_table(out))
    for item in out:
        for name, reason in item.measured.failed.items():
            console.print(Text(f"left out: {item.case.key}: {name}: {reason}"), soft_wrap=True)
    if len(out) < len(several):
        notes.append(
            f"the {minutes:.3g} minutes are over: {len(several) - len(out)} of {len(several)} cases are left, the same command "
            "goes on with them, and --minutes gives more time; until then they are computed as if never measured"
        )
    for line in notes:
        console.print(Text(f"note: {line}"), soft_wrap=True)
    console.print(Text(f"remembered in {cache.path}"), soft_wrap=True)
    return out


def _tune_head(run: Run, device: torch.device, console: Screen) -> None:
    """Measure what stages are cut by."""
    shape = ModelShape.of(load_skeleton(run))
    try:
        cost = measure_head(run, shape, device)
    except torch.OutOfMemoryError:
        console.print("note: this device does not hold two layers and the output layer, by which stages would be cut")
        return
    try:
        remember(run, shape, device, cost)
    except OSError as error:
        raise InputError(f"cannot write what was measured of the output layer: {error}") from None
    console.print(
        f"stages: of {cost.tokens} tokens a layer takes {1e3 * cost.layer_s:.3g} ms, the output layer and the loss "
        f"{1e3 * cost.head_s:.3g} ms: as long as {cost.in_layers:.2f} layers",
        soft_wrap=True,
    )


def _measured(
    cases: Sequence[Case], device: torch.device, budget: Budget, cache: PlanCache, console: Screen, progress: bool
) -> list[Tuned]:
    """The cases in their order until the time is over; the first one in any case."""
    out: list[Tuned] = []
    columns = (TextColumn("measuring plans"), BarColumn(), TextColumn("{task.fields[said]}"))
    make, start = group_maker(device), time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not progress, refresh_per_second=2) as bar:
        task = bar.add_task("", total=len(cases), said="")
        for number, case in enumerate(cases):
            left = max(0.0, budget.limit_s - (time.perf_counter() - start))
            said = f"{number} of {len(cases)} cases, at most {duration(left)} left"
            bar.update(task, completed=number, said=said)
            plans = candidates(case, device, lossy=budget.lossy)
            count = budget.affordable(_step_seconds(case, device, make), left)
            if count < 2 and out:
                break
            out.append(_tune_case(case, plans[: max(count, 2)], device, make, budget.case_s, cache))
    return out


@dataclass(frozen=True, slots=True)
class Budget:
    """limit_s: seconds of all cases together. case_s: of the counted rounds of a case. lossy: plans that merge weights are
    measured too."""

    limit_s: float
    case_s: float
    lossy: bool

    def affordable(self, step_s: float, left: float) -> int:
        """Number of plans of a case that a share of the limit, and the seconds that are left, allow.

        Args:
            step_s: seconds of the plain chain, of which no candidate should take more than FAR times as many.
        """
        fewest = (UNCOUNTED + COUNTED[0]) * FAR * step_s
        share = int(min(left, PART * self.limit_s) / max(fewest, 1e-9))
        return share if share > 2 else 2 * (2 * fewest <= left)


def _step_seconds(case: Case, device: torch.device, make: Make) -> float:
    """Time of the plain chain of a case, once it is compiled; 0 where it fails, which measuring reports."""
    try:
        step = make(case, CHAIN)
        step()
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
    except Exception:  # for example out of memory
        return 0.0
    return time.perf_counter() - began


def _tune_case(
    case: Case, plans: Sequence[Plan], device: torch.device, make: Make, budget_s: float, cache: PlanCache
) -> Tuned:
    measured = measure(case, plans, device, make, budget_s, COUNTED)
    if CHAIN.name not in measured.ms:
        return Tuned(case, measured, None)
    record = with_earlier(measured, cache.get(case.key))
    try:
        cache.put({case.key: record})
    except OSError as error:
        raise InputError(f"cannot write measured plans to {cache.path}: {error}") from None
    return Tuned(case, measured, fastest(plans, measured.ms))


def _table(tuned: Iterable[Tuned]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("case", "plan", "ms", "plain chain, ms", "speedup"):
        table.add_column(heading, justify="left" if heading in ("case", "plan") else "right")
    for item in tuned:
        if item.plan is None or item.speedup is None:
            table.add_row(Text(item.case.key), "none", "", "", "")
            continue
        ms = item.measured.ms
        table.add_row(
            Text(item.case.key),
            ordered(item.plan, item.case.torch_dtype.itemsize).name,
            f"{ms[item.plan.name]:.3f}",
            f"{ms[CHAIN.name]:.3f}",
            f"{item.speedup:.2f}",
        )
    return table
