"""`packlora tune`: measure the plans for what a run will meet, or for usual shapes, and remember them for this device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from packlora.adapters.peft_files import check_start, continued_config
from packlora.adapters.siblings import sibling_groups
from packlora.adapters.spec import AdapterSpec, peft_config, resolve
from packlora.config import Run
from packlora.demo_model import base_path
from packlora.errors import InputError
from packlora.model import ATTENTION, choose_device, load_skeleton
from packlora.ops.lora_linear.plan import CHAIN, Plan, ordered
from packlora.plans.cache import PlanCache, Record, fastest
from packlora.plans.case import Case, token_bucket
from packlora.plans.measure import Measured, candidates, measure
from packlora.plans.space import legal_plans
from packlora.prepare import AUTO_BUDGET

SMALLEST = 8
"""Microbatches are measured from this part of the largest one upwards; of a full schedule few are smaller."""

TRACED = 8
"""Tokens of the forward by which groups are found; any number will do."""

GPU_SHAPES = ((4096, 4096), (5120, 5120), (8192, 8192), (4096, 14336), (14336, 4096))
GPU_GROUPS = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)))
CPU_GROUPS = ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,)))
"""(K, Ns): single layers and groups of common models; on a CPU those of SmolLM2-135M."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of one case: the fastest plan, its time and the plain chain's in milliseconds; or why there is none."""

    case: Case
    measured: Measured
    plan: Plan | None

    @property
    def speedup(self) -> float | None:
        """Time of the plain chain over that of the plan."""
        if self.plan is None:
            return None
        return self.measured.ms[CHAIN.name] / self.measured.ms[self.plan.name]


# --- which cases -------------------------------------------------------------------------------------------------------


def standard_cases(device: torch.device) -> list[Case]:
    """Usual layers at rank 16 with and without dropout, and four adapters of ranks 8 to 64 at once."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    groups = (*((K, (N,)) for K, N in GPU_SHAPES), *GPU_GROUPS) if gpu else CPU_GROUPS
    out = []
    for K, Ns in groups:
        for ranks, drops in (((16,), (False,)), ((16,), (True,)), ((8, 16, 32, 64), (False, True, True, True))):
            for tokens in (2048, 8192) if gpu else (512, 2048):
                by_adapter = [[rank] * len(Ns) for rank in ranks]
                out.append(Case.of(device, dtype, tokens, K, Ns, by_adapter, drops, [False] * len(Ns)))
    return out


def cases_of_run(run: Run, device: torch.device) -> tuple[list[Case], list[str]]:
    """The cases of a run file, without its weights or data: every group of adapted layers, with each job alone and all jobs
    together, in microbatches from an eighth of the largest up. Second: what the user should know.

    Raises:
        InputError: the model, an adapter or its targets are wrong.
    """
    skeleton = load_skeleton(run)
    path = base_path(run.base_model)
    specs = {}
    for job in run.jobs:
        if job.adapter.init_from is not None:
            config = continued_config(job.adapter, path, run.revision, job.name)
        else:
            config = peft_config(job.adapter, path, run.revision)
        specs[job.name] = resolve(config, skeleton, job.name, job.adapter.dora_dropout == "peft")
        if job.adapter.init_from is not None:
            check_start(job.adapter, specs[job.name], skeleton, job.name)
    adapted = [
        name for name, _ in skeleton.named_modules() if any(_rank(spec, name) for spec in specs.values())
    ]  # in model order
    groups, first, notes = _groups(skeleton, adapted)
    budget = run.max_tokens_per_microbatch
    tokens = _buckets(AUTO_BUDGET[device.type] if budget == "auto" else int(budget))
    mixes = [[name] for name in specs] + ([list(specs)] if len(specs) > 1 else [])
    out: dict[Case, None] = {}
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
                    int(layers[0].in_features),
                    [int(layer.out_features) for layer in layers],
                    [[_rank(spec, name) for name in group] for spec in chosen],
                    [bool(drop) for drop in drops],
                    [layer.bias is not None for layer in layers],
                    needs=(not first.issuperset(group), True, True),
                    composed=any(module.use_dora or module.train_bias for module in modules),
                    base_dropped=any(module.use_dora and module.dropout and module.base_dropped for module in modules),
                )
                out[case] = None
    return list(out), notes


def _rank(spec: AdapterSpec, name: str) -> int:
    return spec.modules[name].rank if name in spec.modules else 0


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
    handles = []
    skeleton.requires_grad_(False)
    for path in adapted:

        def note(_: torch.nn.Module, args: tuple[torch.Tensor, ...], path: str = path) -> None:
            if args and not args[0].requires_grad:
                first.add(path)

        module = skeleton.get_submodule(path)
        module.weight.requires_grad_(True)
        handles.append(module.register_forward_pre_hook(note))
    try:
        skeleton(**example)
    except Exception as error:  # a model may do anything in its forward
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return [(path,) for path in adapted], set(), [f"layers are measured one by one, not in groups: {reason}"]
    finally:
        for handle in handles:
            handle.remove()
    found = sibling_groups(skeleton, adapted, example)
    group_of = {path: group for group in found for path in group}
    return list(dict.fromkeys(group_of.get(path, (path,)) for path in adapted)), first, []


# --- measuring them ----------------------------------------------------------------------------------------------------


def tune(
    run: Run | None = None,
    device: torch.device | None = None,
    progress: bool = True,
    lossy: bool = False,
    budget_s: float = 1.0,
    cache: PlanCache | None = None,
) -> list[Tuned]:
    """Measure, store after every case, print a table.

    Args:
        run: whose cases; None for the standard ones.
        device: by default the run's, or the first GPU, or the CPU.
        progress: show a bar.
        lossy: also measure plans that round more than the plain chain.
        budget_s: seconds of counted rounds per case.
        cache: where to store; by default the device's own file.

    Raises:
        InputError: bad input, or the cache cannot be written.
    """
    device = device or choose_device(run.device if run else "auto")
    cases, notes = cases_of_run(run, device) if run else (standard_cases(device), [])
    cache = cache or PlanCache(device)
    several = [case for case in cases if len(legal_plans(case, lossy)) > 1]
    if len(several) < len(cases):
        notes.append(f"{len(cases) - len(several)} cases have one plan, the plain chain (DoRA), and are not measured")
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    out = []
    columns = (TextColumn("measuring plans"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        for case in bar.track(several, description="measuring plans"):
            out.append(_tune_case(case, device, lossy, budget_s, cache))
    console.print(_table(out))
    for item in out:
        for name, reason in item.measured.failed.items():
            console.print(Text(f"left out: {item.case.key}: {name}: {reason}"), soft_wrap=True)
    for line in notes:
        console.print(Text(f"note: {line}"), soft_wrap=True)
    console.print(Text(f"remembered in {cache.path}"), soft_wrap=True)
    return out


def _tune_case(case: Case, device: torch.device, lossy: bool, budget_s: float, cache: PlanCache) -> Tuned:
    plans = {plan.name: plan for plan in candidates(case, device, lossy)}
    measured = measure(case, list(plans.values()), device, budget_s=budget_s)
    if CHAIN.name not in measured.ms:
        return Tuned(case, measured, None)
    record = Record.of(plans, measured)
    try:
        cache.put({case.key: record})
    except OSError as error:
        raise InputError(f"cannot write measured plans to {cache.path}: {error}") from None
    return Tuned(case, measured, fastest(plans.values(), measured.ms))


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
