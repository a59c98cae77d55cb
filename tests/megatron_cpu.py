"""Megatron-Core on CPUs over gloo, for tests: what it asks of CUDA is answered for the time of a test; tiny models of it.

Import it only where megatron.core is there.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

DEGREE, EXPERTS = "tensor_model_parallel_size", "expert_model_parallel_size"


class _Nothing:
    """A CUDA stream or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *args, **kwargs: _Nothing()


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)

    return made


class Norm(torch.nn.Module):
    """An RMS norm for any layout: Megatron-Core's own around torch's refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@contextmanager
def megatron(tp: int = 1, ep: int = 1, etp: int = 1, pp: int = 1, vpp: int | None = None) -> Iterator[None]:
    """Process groups of Megatron-Core over all processes, on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    state: dict[str, Any] = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda new, *args, **kwargs: torch.set_rng_state(new),
    }
    cuda: dict[str, Any] = {
        "current_device": lambda: "cpu", "Stream": _Nothing, "Event": _Nothing, "current_stream": _Nothing,
        "stream": lambda stream: _Nothing(), "manual_seed": torch.manual_seed, "synchronize": lambda *args: None,
        "get_rng_state": lambda *args: torch.get_rng_state(), "set_rng_state": lambda new, *args: torch.set_rng_state(new),
    }  # fmt: skip
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in state.items():
            stack.enter_context(mock.patch.object(random, name, value))
        logging.getLogger(random.__name__).setLevel(logging.ERROR)  # here the CPU's generator stands for the GPU's
        for name in ("tensor", "zeros", "ones"):
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        # files are written by processes, which ranks of the tests' pool may not have otherwise
        stack.enter_context(mock.patch.object(filesystem_async, "_results_queue", queue.Queue()))
        stack.enter_context(mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False}))  # type: ignore[attr-defined]

        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        exchange = token_dispatcher.all_to_all
        stack.enter_context(mock.patch.object(token_dispatcher, "all_to_all", _with_lists(exchange)))
        _groups(tp, ep, etp, pp)
        if vpp is not None:
            parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = vpp
            parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
        random.model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            for name in vars(parallel_state).keys() & _UNSET.keys():
                setattr(parallel_state, name, _UNSET[name])


@contextmanager
def types_of_gpu() -> Iterator[None]:
    """For Megatron-Core's optimizers, which know tensors of GPUs in 16 and 32 bits."""
    narrower = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float16: "torch.cuda.HalfTensor"}
    kind, narrow = torch.Tensor.type, torch.Tensor.float

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(self, *args, **kwargs)
        return narrower.get(self.dtype, "torch.cuda.FloatTensor")

    def wide(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else narrow(self, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "type", named), mock.patch.object(torch.Tensor, "float", wide):
        yield


_UNSET: dict[str, Any] = {}
_MADE: dict[tuple[int, ...], dict[str, Any]] = {}
"""What parallel_state holds, before it is set and by layout. A process group is a handful of threads and is never ended, so
each layout has its groups once."""


def _groups(*layout: int) -> None:
    from megatron.core import parallel_state

    def state() -> dict[str, Any]:
        return {name: value for name, value in vars(parallel_state).items() if name.isupper() and name.startswith("_")}

    if not _UNSET:
        _UNSET.update(state())
    if layout not in _MADE:
        tp, ep, etp, pp = layout
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )  # fmt: skip
        _MADE[layout] = state()
    for name, value in _MADE[layout].items():
        setattr(parallel_state, name, value)


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers of tokens are lists of numbers on a GPU's host, and tensors on a CPU."""

    def run(group: Any, rows: torch.Tensor, *splits: Any) -> Any:
        return exchange(group, rows, *[s.tolist() if isinstance(s, torch.Tensor) else s for s in splits])

    return run


def config_of(tp: int = 1, sequence: bool = False, ep: int = 1, etp: int = 1, **others: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6,
            "ffn_hidden_size": 20, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm", "add_bias_linear": False, "use_cpu_initialization": True,
            "params_dtype": torch.float64, "pipeline_dtype": torch.float64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "attention_softmax_in_fp32": False, "bias_activation_fusion": False, "masked_softmax_fusion": False,
            "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, DEGREE: tp, EXPERTS: ep,
            "expert_tensor_parallel_size": etp, "sequence_parallel": sequence and tp > 1,
        } | others
    )  # fmt: skip


def model_of(
    tied: bool = False, words: int = 48, te: bool = False, mixed: bool = False, stage: int | None = None, stages: int = 2,
    chunk: int | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """A tiny model in float64, with the same whole weights in any layout. te: of layers that have Transformer Engine's names,
    attributes and calls. mixed: with layers that are whole on every process. stage: of so many; chunk: of this process's, where
    it has several."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(**kwargs)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if te or mixed:
        from megatron_te import NormAndMix, use_stand_ins

        if mixed:
            spec.submodules.input_layernorm = NormAndMix
        if te:
            use_stand_ins(spec)
    with mock.patch("megatron.core.transformer.transformer_block.LayerNormImpl", Norm):
        model = GPTModel(
            config, spec, vocab_size=words, max_sequence_length=64, position_embedding_type="rope",
            share_embeddings_and_output_weights=tied, pre_process=stage in (None, 0), post_process=stage in (None, stages - 1),
            vp_stage=chunk if stages > 2 else None,
        )  # fmt: skip
    model.double()
    fill(model)
    return model


def latent_model(query_rank: int | None, **others: Any) -> Any:
    """A tiny model in float64 with multi-latent attention, on one process; query_rank: None of queries that are not."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    class Attention(DotProductAttention):  # type: ignore[misc]
        """Megatron-Core's own takes no widths of keys and values."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class InnerNorm(Norm):
        def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
            super().__init__(config, hidden_size, 1e-6)  # transformers' own, whatever the configuration says

    usual = {key: value for key, value in vars(config_of()).items() if key in _LATENT - others.keys()}
    config = MLATransformerConfig(
        **usual, multi_latent_attention=True, q_lora_rank=query_rank, kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4,
        v_head_dim=6, rope_type="rope", apply_rope_fusion=False, **others,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(config.num_moe_experts, multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = Attention
    attention.q_layernorm = attention.kv_layernorm = InnerNorm
    with (
        mock.patch("megatron.core.transformer.transformer_block.LayerNormImpl", Norm),
        mock.patch("megatron.core.transformer.multi_latent_attention.TELinear", Norm),
    ):
        model = GPTModel(
            config, spec, vocab_size=48, max_sequence_length=64, position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
    model.double()
    fill(model)
    return model


_LATENT = {
    "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "gated_linear_unit",
    "activation_func", "normalization", "add_bias_linear", "use_cpu_initialization", "params_dtype", "pipeline_dtype",
    "hidden_dropout", "attention_dropout", "attention_softmax_in_fp32", "bias_activation_fusion", "masked_softmax_fusion",
    "bias_dropout_fusion", "gradient_accumulation_fusion",
}  # fmt: skip


def fill(model: Any, seed: int = 3) -> None:
    """Weights that are slices of whole ones drawn by name; those of norms by their size."""
    from packlora.megatron.layers import global_name, layers_of

    known = {(id(layer.module), layer.weight): layer for layer in layers_of([model]).values()}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            layer = known.get((id(module), leaf))
            if leaf == "bias" and (owner := known.get((id(module), "weight"))) is not None and owner.dim == 0:
                layer = owner  # its rows are cut as those of the weight
            name = f"{global_name(model, path)}.{leaf}" if layer is None else f"{layer.name}.weight"
            cut = layer is not None and layer.kind == "linear" and layer.dim is not None
            dim = (
                (layer.dim if cut else 0 if layer is not None and layer.kind == "embedding" else None)
                if layer
                else None
            )
            whole = list(parameter.shape)
            if layer is not None and dim is not None:
                whole[dim] *= layer.degree
            generator = torch.Generator().manual_seed(hash_of(whole if len(whole) == 1 else name, seed))
            value = torch.randn(whole, dtype=torch.float64, generator=generator)
            value = 1 + value * 0.1 if len(whole) == 1 else value * (1.2 / whole[-1] ** 0.5)
            if layer is not None and layer.gated:
                value = torch.cat([half.chunk(layer.degree)[layer.rank] for half in value.chunk(2)])
            elif layer is not None and dim is not None:
                value = value.chunk(layer.degree, dim)[layer.rank]
            parameter.data.copy_(value)


def hash_of(*parts: object) -> int:
    import zlib

    return zlib.crc32(repr(parts).encode())
