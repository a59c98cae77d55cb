"""Feed-forward layers of Megatron-Core over the processes: frozen, with packlora's adapters, with plain ones beside them.

    for row in measured_rows(device): ...

Another benchmark calls it, in processes that torchrun has started; Megatron-Core's process groups are made here, over all of
them, and are gone afterwards.

Shapes: T tokens, D hidden size, F features between the layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer import TransformerConfig
from peft import LoraConfig

from packlora.megatron import apply_lora
from packlora.plans.timing import Contender, Work, paired

RANK, DROPOUT = 16, 0.1
SHAPES = {"8B": (4096, 14336, 8192), "tiny": (32, 48, 16)}
"""D, F and T."""
CONTENDERS = ("frozen", "packlora", "packlora_dora", "plain")
ROUNDS = 20


class FeedForward(torch.nn.Module):
    """x [T, 1, D] through a column-parallel layer and a row-parallel one."""

    def __init__(self, shape: str, sequence: bool, device: torch.device) -> None:
        super().__init__()
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


def measured_rows(device: torch.device, shape: str = "8B", rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A row for each layout, plain and with sequence parallelism where there are several processes: medians in milliseconds of
    a forward and backward, and their ratios to the frozen layers."""
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    try:
        return [_row(device, shape, sequence, rounds) for sequence in (False, True)[: 1 + (size > 1)]]
    finally:
        parallel_state.destroy_model_parallel()


def _row(device: torch.device, shape: str, sequence: bool, rounds: int) -> dict[str, Any]:
    D, _, T = SHAPES[shape]
    size = dist.get_world_size()
    torch.manual_seed(1)
    tokens = T // size if sequence else T
    x, dy = (torch.randn(tokens, 1, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    contenders = [Contender(name, lambda name=name: _work(name, shape, sequence, x, dy)) for name in CONTENDERS]  # type: ignore[misc]
    timings = paired(contenders, device, rounds=(rounds, rounds))
    case = f"Megatron {shape} tp{size}{' sp' if sequence else ''}"
    return {"case": case, "processes": size, "shape": shape, "sequence": sequence, **timings.row()}


def _work(name: str, shape: str, sequence: bool, x: torch.Tensor, dy: torch.Tensor) -> Work:
    model: torch.nn.Module = FeedForward(shape, sequence, x.device)
    if name.startswith("packlora"):
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            lora_dropout=DROPOUT,
            target_modules="all-linear",
            use_dora=name.endswith("dora"),
        )
        adapters = apply_lora(model, config)
        with torch.no_grad():
            for parameter in adapters.parameters("default"):
                parameter.add_(torch.randn_like(parameter), alpha=0.002)
    elif name == "plain":
        assert isinstance(model, FeedForward)
        model = Plain(model, sequence)

    def clear() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        dist.all_reduce(x.new_zeros(1))  # no process begins before all are there

    return Work(lambda: model(x).backward(dy), clear)
