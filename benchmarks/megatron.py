"""`megatron`: feed-forward layers of Megatron-Core, frozen, with packlora's adapters, with plain ones beside.

    python -m benchmarks megatron --out megatron-h200.json
    torchrun --nproc-per-node 2 -m benchmarks megatron --out megatron-h200.json

Needs `packlora[megatron]` and nothing of Transformer Engine. Tensor parallelism is over all processes; on four GPUs there is a
layer of experts too, with tensor parallelism over two and the experts shared out to two. Megatron-Core's process groups are
made here and are gone afterwards. Shapes: T tokens, D hidden size, F features between the layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig

from benchmarks.harness import Benchmark, Case, Options, Row, case, timed
from benchmarks.processes import aligned, messages
from packlora.errors import InputError
from packlora.parallel.collectives import GATHER, SCATTER
from packlora.tune.timing import Work

RANK, DROPOUT = 16, 0.1
SHAPES = {"8B": (4096, 14336, 8192), "tiny": (32, 48, 16)}
"""D, F and T."""
EXPERTS, TOP, EXPERTS_TP = 8, 2, 2
"""Experts, those that a token goes to, and tensor parallelism beside them."""
ROUNDS = {False: 20, True: 8}
"""Rounds, which must be as many on every process; of --quick."""


def cases(options: Options) -> list[Case]:
    """Raises InputError where Megatron-Core is not installed."""
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise InputError(f"megatron needs megatron-core ({error}): pip install 'packlora[megatron]'") from None
    shape, size = "tiny" if options.tiny else "8B", options.mesh.size
    found = [
        case(f"{shape} {'sp' if sequence else 'plain'} tp{size}", shape=shape, processes=size, sequence=sequence)
        for sequence in (False, True)[: 1 + (size > 1 and _splits_tokens())]
    ]
    if size % 4 == 0 and _splits_tokens():
        ep = size // EXPERTS_TP
        label = f"{shape} experts tp{EXPERTS_TP} ep{ep}"
        found.append(case(label, shape=shape, processes=size, sequence=True, experts=ep))
    return found


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


class Experts(torch.nn.Module):
    """x [T, 1, D], this process's tokens, through a router and the experts that it chooses for each of them."""

    def __init__(self, shape: str, ep: int, device: torch.device) -> None:
        super().__init__()
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.spec_utils import build_module

        D, F, _ = SHAPES[shape]
        config = TransformerConfig(
            num_layers=1, hidden_size=D, num_attention_heads=8, ffn_hidden_size=F, moe_ffn_hidden_size=F, add_bias_linear=False,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
            tensor_model_parallel_size=EXPERTS_TP, sequence_parallel=True, expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1, num_moe_experts=EXPERTS, moe_router_topk=TOP, moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none", params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True,
            perform_initialization=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        self.mlp = build_module(get_moe_module_spec(use_te=False, num_experts=EXPERTS), config=config)
        self.to(device)
        torch.manual_seed(0)  # the router's weight must be the same everywhere, and is the first
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x)[0]
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


def _work(name: str, one: Case, x: torch.Tensor, dy: torch.Tensor) -> Work:
    from packlora.megatron import apply_lora

    experts = one.values.get("experts")
    model: torch.nn.Module
    model = Experts(one.shape, experts, x.device) if experts else FeedForward(one.shape, one.sequence, x.device)
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
        model = Plain(model, one.sequence)

    def clear() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)

    return Work(lambda: model(x).backward(dy), clear)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(one: Case, names: list[str], options: Options) -> Row:
    D, _, T = SHAPES[one.shape]
    torch.manual_seed(1)
    experts = one.values.get("experts")
    degree = EXPERTS_TP if experts else one.processes
    tokens = T // degree if one.sequence else T
    x, dy = (torch.randn(tokens, 1, D, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    made: dict[str, Work] = {}
    with _groups(options.device, degree, experts or 1):
        contenders = [
            aligned(name, partial(_work, name, one, x, dy), options.mesh, options.device, made)
            for name in names
            if not (experts and name == "plain")
        ]
        row = {"T": T, **timed(contenders, options, rounds=(ROUNDS[options.quick],) * 2)}
        if experts:  # whose messages are in groups of two
            return row
        with by_name():
            return row | {"messages": messages(made)}


def _splits_tokens() -> bool:
    """Return whether Megatron-Core's sequence parallelism runs here: it asks which GPU is the current one."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        return False
    return True


@contextlib.contextmanager
def _groups(device: torch.device, tp: int, ep: int) -> Iterator[None]:
    """Megatron-Core's process groups over all processes, or over this one alone."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    alone = not dist.is_initialized()
    if alone:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    gemm = getattr(moe_utils, "te_general_gemm", None)  # which it asks for in any case
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else None,
        )
        with mock.patch.object(moe_utils, "te_general_gemm", gemm, create=True):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        if alone:
            dist.destroy_process_group()


def summary(rows: list[Row]) -> Row:
    """Times over that of the frozen layers, by contender and processes, with _sp of those cases."""
    out: Row = {}
    for row in rows:
        dense = f"tp{row['processes']}{'_sp' * row['sequence']}"
        end = f"tp{EXPERTS_TP}_ep{row['experts']}" if "experts" in row else dense
        out |= {f"{name}_over_frozen_{end}": over for name, over in row["over_frozen"].items()}
    return out


MEGATRON = Benchmark(
    cases, measure, summary,
    "A column-parallel and a row-parallel layer of Megatron-Core with the sizes of Llama-3.1-8B's feed-forward "
    "layers and no activation between them, random bfloat16 weights, 8192 tokens, cut over the processes, plain or "
    "with tokens of their own between the layers (sp); forward and backward. frozen: no adapter. packlora: LoRA r "
    "16, alpha 32, dropout 0.1 on both by packlora.megatron.apply_lora, float32, B not zero; _dora: DoRA. plain: an "
    "A and a B of bfloat16 beside each layer, by torch, with messages of their own. experts: a layer of "
    f"{EXPERTS} such gated experts (SequentialMLP), {TOP} for a token, alltoall, tensor parallel size {EXPERTS_TP} with "
    "sequence parallelism, whole experts shared out to half of the processes. Contenders run in turn inside "
    "one loop, random order each round, the GPUs of all processes aligned before each run, CUDA events, medians, "
    "ratios within a round. messages: collectives of a forward and backward by this process, and sent: their bytes "
    "where messages go round in a ring. Figures are process 0's.",
    ["frozen", "packlora", "packlora_dora", "plain"], by_case=True, where="either",
)  # fmt: skip
