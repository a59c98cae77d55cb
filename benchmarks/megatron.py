"""`benchmarks megatron`: feed-forward layers of Megatron-Core, frozen, with packlora's adapters, with plain ones beside.

    python -m benchmarks megatron --out megatron-h200.json
    torchrun --nproc-per-node 2 -m benchmarks megatron --out megatron-h200.json

Needs `packlora[megatron]` and nothing of Transformer Engine. Tensor parallelism is over all processes; a run with another
number of processes adds its rows to the file. Megatron-Core's process groups are made here and are gone afterwards.

Shapes: T tokens, D hidden size, F features between the layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig

from benchmarks.layer import show
from benchmarks.options import Options, Outcome, choose
from benchmarks.processes import alarm, measured_rows, messages, together
from benchmarks.processes import message_table as table
from benchmarks.processes import part_of as part_of
from packlora.errors import InputError
from packlora.parallel.collectives import GATHER, SCATTER
from packlora.parallel.mesh import Mesh, OneProcess
from packlora.plans.timing import Contender, Work, paired

RANK, DROPOUT = 16, 0.1
SHAPES = {"8B": (4096, 14336, 8192), "tiny": (32, 48, 16)}
"""D, F and T."""
CONTENDERS = ["frozen", "packlora", "packlora_dora", "plain"]
ROUNDS, QUICK_ROUNDS = 20, 8
PROTOCOL = (
    "A column-parallel and a row-parallel layer of Megatron-Core with the sizes of Llama-3.1-8B's feed-forward layers and no "
    "activation between them, random bfloat16 weights, 8192 tokens, cut over the processes, plain or with tokens of their own "
    "between the layers (sp); forward and backward. frozen: no adapter. packlora: LoRA r 16, alpha 32, dropout 0.1 on both by "
    "packlora.megatron.apply_lora, float32, B not zero; _dora: DoRA. plain: an A and a B of bfloat16 beside each layer, by "
    "torch, with messages of their own. Contenders run in turn inside one loop, random order each round, the GPUs of all "
    "processes aligned before each run, CUDA events, medians, ratios within a round. messages: collectives of a forward and "
    "backward by this process, and sent: their bytes where messages go round in a ring. Figures are process 0's."
)


@dataclass(frozen=True, slots=True)
class Case:
    """sequence: processes have tokens of their own between the layers."""

    shape: str
    processes: int
    sequence: bool

    @property
    def label(self) -> str:
        return f"{self.shape} {'sp' if self.sequence else 'plain'} tp{self.processes}"


class FeedForward(torch.nn.Module):
    """x [T, 1, D] through a column-parallel layer and a row-parallel one."""

    def __init__(self, shape: str, sequence: bool, device: torch.device) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer import TransformerConfig

        D, F, _ = SHAPES[shape]
        config = TransformerConfig(
            num_layers=1, hidden_size=D, num_attention_heads=8, ffn_hidden_size=F, add_bias_linear=False,
            tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence, params_dtype=torch.bfloat16,
            bf16=True, use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        words: Any = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
        self.linear_fc1 = ColumnParallelLinear(D, F, gather_output=False, skip_bias_add=False, **words)
        self.linear_fc2 = RowParallelLinear(F, D, input_is_parallel=True, skip_bias_add=False, **words)
        self.to(device)
        torch.manual_seed(0)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear_fc2(self.linear_fc1(x)[0])[0]
        return y


class Plain(torch.nn.Module):
    """The same layers, each with an A and a B of the model's dtype beside it. Their outputs are added to the layer's; they have
    messages of their own, of all inputs before a column-parallel layer and of the ranks behind a row-parallel one."""

    def __init__(self, base: FeedForward, sequence: bool) -> None:
        super().__init__()
        self.base, self.sequence = base, sequence
        sizes = [tuple(layer.weight.shape) for layer in (base.linear_fc1, base.linear_fc2)]
        device = base.linear_fc1.weight.device
        words: Any = {"device": device, "dtype": torch.bfloat16}
        self.A = torch.nn.ParameterList([torch.randn(RANK, inputs, **words) * 0.01 for _, inputs in sizes])
        self.B = torch.nn.ParameterList([torch.randn(outputs, RANK, **words) * 0.01 for outputs, _ in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        enter = mappings.copy_to_tensor_model_parallel_region
        if self.sequence:
            enter = mappings.gather_from_sequence_parallel_region
        inner = self.base.linear_fc1(x)[0] + self._low_rank(0, enter(x))
        y: torch.Tensor = self.base.linear_fc2(inner)[0]
        S = mappings.reduce_from_tensor_model_parallel_region(self._down(1, inner))
        more = torch.nn.functional.linear(S, self.B[1]) * 2.0
        return y + (mappings.scatter_to_sequence_parallel_region(more) if self.sequence else more)

    def _down(self, at: int, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.nn.functional.dropout(x, DROPOUT), self.A[at])

    def _low_rank(self, at: int, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self._down(at, x), self.B[at]) * 2.0


def measured_row(case: Case, names: list[str], options: Options, mesh: OneProcess) -> dict[str, Any]:
    """A case's row of the results."""
    D, _, T = SHAPES[case.shape]
    torch.manual_seed(1)
    tokens = T // case.processes if case.sequence else T
    x, dy = (torch.randn(tokens, 1, D, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    made: dict[str, Work] = {}
    rounds = 2 if options.tiny else QUICK_ROUNDS if options.quick else ROUNDS
    contenders = [_contender(name, case, x, dy, mesh, made) for name in names]
    timings = paired(contenders, options.device, rounds=(rounds, rounds))  # as many on every process
    with by_name():
        sent = messages(made)
    return {
        "case": case.label, "processes": case.processes, "shape": case.shape, "sequence": case.sequence, "T": T,
        **timings.row(), "messages": sent,
    }  # fmt: skip


@contextlib.contextmanager
def by_name() -> Iterator[None]:
    """Megatron-Core, which holds collectives that it has imported, asks torch for them, as whoever counts them needs it."""
    from megatron.core.tensor_parallel import layers, mappings

    def late(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(dist, name)(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in (layers, mappings):
            stack.enter_context(mock.patch.object(module, "dist_all_gather_func", late(GATHER)))
            stack.enter_context(mock.patch.object(module, "dist_reduce_scatter_func", late(SCATTER)))
        yield


def _contender(
    name: str, case: Case, x: torch.Tensor, dy: torch.Tensor, mesh: OneProcess, made: dict[str, Work]
) -> Contender:
    """By name: one of CONTENDERS. Its work is left in `made`."""

    def make() -> Work:
        work = _work(name, case, x, dy)
        if isinstance(mesh, Mesh):
            alarm()
            work = together(work, mesh, x.device)
        made[name] = work
        return work

    return Contender(name, make)


def _work(name: str, case: Case, x: torch.Tensor, dy: torch.Tensor) -> Work:
    from packlora.megatron import apply_lora

    model: torch.nn.Module = FeedForward(case.shape, case.sequence, x.device)
    if name.startswith("packlora"):
        dora = name.endswith("dora")
        config = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=DROPOUT, target_modules="all-linear", use_dora=dora
        )
        adapters = apply_lora(model, config)
        with torch.no_grad():
            for parameter in adapters.parameters("default"):
                parameter.add_(torch.randn_like(parameter), alpha=0.002)
    elif name == "plain":
        assert isinstance(model, FeedForward)
        model = Plain(model, case.sequence)

    def clear() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)

    return Work(lambda: model(x).backward(dy), clear)


# --- measuring --------------------------------------------------------------------------------------------------------


def run(options: Options, mesh: OneProcess | None = None) -> Outcome:
    """Measure; the first process prints a line per case.

    Raises:
        InputError: Megatron-Core is not installed.
    """
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise InputError(f"bench megatron needs megatron-core ({error}): pip install 'packlora[megatron]'") from None
    mesh, size = mesh or OneProcess(), 1 if mesh is None else mesh.size
    shape = "tiny" if options.tiny else "8B"
    every = [Case(shape, size, sequence) for sequence in (False, True)[: 1 + (size > 1 and _splits_tokens())]]
    names, chosen = choose(options.only, CONTENDERS, [], every)
    with _groups(options.device):
        if isinstance(mesh, Mesh):
            rows = measured_rows(chosen, lambda case: measured_row(case, names, options, mesh), options, mesh)
        else:
            rows = list(options.kept)
            for case in options.each(chosen, rows):
                rows.append(measured_row(case, names, options, mesh))
                show(rows[-1], options.device)
    return Outcome(PROTOCOL, rows, options.keys(summary(rows)), table(rows))


def _splits_tokens() -> bool:
    """Whether Megatron-Core's sequence parallelism runs here: it asks which GPU is the current one."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        return False
    return True


@contextlib.contextmanager
def _groups(device: torch.device) -> Iterator[None]:
    """Megatron-Core's process groups over all processes, or over this one alone."""
    from megatron.core import parallel_state

    alone = not dist.is_initialized()
    if alone:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if alone:
            dist.destroy_process_group()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Times over that of the frozen layers, by contender and processes, with _sp of those cases; None where it was not
    measured."""
    return {
        f"{name}_over_frozen_tp{row['processes']}{'_sp' if row['sequence'] else ''}": row["over_frozen"].get(name)
        for row in rows
        for name in CONTENDERS[1:]
    }
