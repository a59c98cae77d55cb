"""What ranks do in tests of adapters on Megatron-Core models: one model in several layouts, whole gradients, steps."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_cpu import hash_of, latent_model, megatron, model_of, types_of_gpu
from peft import LoraConfig
from seeds import SOAK

from packlora.megatron import MegatronAdapters, apply_lora
from packlora.megatron.attach import cut_of
from packlora.ops.dropout.keys import packed_token_keys

LENGTHS = (5, 3, 6, 2)
"""Tokens of the samples of a packed batch; 16 together."""
WORDS = 48
BOUND = 1e-10


@dataclass(frozen=True)
class Layout:
    """tp, ep, etp: tensor, expert and expert tensor parallel sizes."""

    tp: int = 1
    sequence: bool = False
    ep: int = 1
    etp: int = 1


ONE = Layout()
DENSE = (Layout(2), Layout(2, True))


@dataclass(frozen=True)
class Case:
    """adapters: arguments of LoraConfig by name. owners: the adapter of each sample, None of one adapter without owners."""

    adapters: Mapping[str, dict[str, Any]]
    owners: tuple[str | None, ...] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = DENSE
    te: bool = False
    """The other layouts have layers as Transformer Engine's."""


def lora(**others: Any) -> dict[str, Any]:
    return {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"} | others


def built(case: Case, layout: Layout, reference: bool = False) -> tuple[Any, MegatronAdapters]:
    """The model with adapters that have whole values drawn by name."""
    kwargs = dict(case.model) | ({"te": True} if case.te and not reference else {})
    model = model_of(tp=layout.tp, sequence=layout.sequence, ep=layout.ep, etp=layout.etp, **kwargs)
    adapters = apply_lora(model, {name: LoraConfig(**one) for name, one in case.adapters.items()})
    randomise(adapters)
    return model, adapters


def randomise(adapters: MegatronAdapters) -> None:
    """B and magnitudes that are not those of a beginning; A stays."""
    for name in adapters.names:
        for path, key, parameter in named(adapters, name):
            layer = adapters._placed.layers[path]
            if key == "A" and layer.kind != "embedding":
                continue
            shard = cut_of(layer)
            whole = parameter.shape if shard is None else shard.whole_shape(key, parameter.shape)
            generator = torch.Generator().manual_seed(hash_of(name, path, key, 0))
            value = torch.randn(whole, dtype=torch.float64, generator=generator) * 0.3
            value = value.abs() + 1 if key == "magnitude" else value
            with torch.no_grad():
                parameter.copy_(value if shard is None else shard.own(key, value))


def named(adapters: MegatronAdapters, name: str) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    for path, own in adapters._placed.weights[name].items():
        for key, parameter in own.named_parameters().items():
            yield path, key, parameter


def ids_of() -> torch.Tensor:
    return torch.randint(WORDS, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def mask_of(lengths: Sequence[int]) -> torch.Tensor:
    """True where nothing is seen: each sample sees itself, causally."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sees = (sample[:, None] == sample[None]).tril()
    return ~sees[None, None]


def keys_of(lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    numbers = list(range(len(lengths)))
    return torch.from_numpy(packed_token_keys([7] * len(lengths), [2] * len(lengths), numbers, lengths))


def logits(model: Any, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    out: torch.Tensor = model(ids, torch.arange(ids.shape[1])[None], mask_of(lengths))
    return out


def weights_of_loss(tp: int, rank: int) -> torch.Tensor:
    whole = torch.randn(1, sum(LENGTHS), WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return whole.chunk(tp, -1)[rank]


def active(adapters: MegatronAdapters, case: Case, dropout: bool = True) -> Any:
    if case.owners is None:
        return nullcontext()
    samples = list(zip(case.owners, LENGTHS, strict=True))
    return adapters.active(adapters.owners(samples, keys_of() if dropout else None))


def learnt(case: Case, layout: Layout, reference: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Whole logits and whole gradients, by adapter, layer and parameter."""
    from megatron.core import parallel_state

    model, adapters = built(case, layout, reference)
    torch.manual_seed(5)
    with active(adapters, case):
        y = logits(model, ids_of(), LENGTHS)
        (y * weights_of_loss(layout.tp, parallel_state.get_tensor_model_parallel_rank())).sum().backward()
    return joined_words(y.detach()), whole_gradients(adapters)


def joined_words(y: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole: torch.Tensor = gather_from_tensor_model_parallel_region(y)
    return whole


def whole_gradients(adapters: MegatronAdapters) -> dict[str, torch.Tensor]:
    """What Megatron-Core's own reduction makes of them, joined."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    for name in adapters.names:
        for _, _, parameter in named(adapters, name):
            if getattr(parameter, "average_gradients_across_tp_domain", False):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
            if not getattr(parameter, "allreduce", True) and parameter.grad is not None:
                # an expert has seen the tokens of the processes of its group, here so many times the same ones
                processes = parallel_state.get_expert_model_parallel_world_size()
                processes *= parallel_state.get_expert_tensor_parallel_world_size()
                parameter.grad /= processes / parallel_state.get_tensor_model_parallel_world_size()
    return wholes(adapters, gradients=True)


def wholes(adapters: MegatronAdapters, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Parameters, or their gradients, of all tensor and expert parallel processes, by adapter, layer and parameter."""
    from packlora.megatron.gather import whole_tensors

    before = []
    if gradients:
        for name in adapters.names:
            for _, _, parameter in named(adapters, name):
                before.append((parameter, parameter.data))
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.data = own
    found = {
        f"{name} {path}/{key}": tensor
        for name in adapters.names
        for path, own in whole_tensors(adapters._placed, name).items()
        for key, tensor in own.items()
    }
    for parameter, data in before:
        parameter.data = data
    return found


def compared(rank: int, cases: Sequence[Case]) -> list[dict[str, float]]:
    """For each case and layout the largest relative differences of logits and gradients from those of one process."""
    out = []
    for case in cases:
        with megatron():
            y, grads = learnt(case, ONE, reference=True)
        errors = {}
        for layout in case.layouts:
            with megatron(layout.tp, layout.ep, layout.etp):
                own_y, own_grads = learnt(case, layout)
            assert own_grads.keys() == grads.keys(), own_grads.keys() ^ grads.keys()
            errors[f"{layout} logits"] = difference(own_y, y)
            for name, gradient in grads.items():
                assert gradient.any() or "local_experts" in name, f"{name} has no gradient"
                errors[f"{layout} {name}"] = difference(own_grads[name], gradient)
        out.append(errors)
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    largest = float(b.abs().max())
    return float((a - b).abs().max()) / (largest or 1.0)


def worst(answers: Sequence[Sequence[Mapping[str, float]]]) -> list[tuple[float, str]]:
    """Of each case the largest difference over all ranks, and where."""
    return [
        max((value, name) for errors in of_case for name, value in errors.items())
        for of_case in zip(*answers, strict=True)
    ]


# --- steps ------------------------------------------------------------------------------------------------------------


def stepped(rank: int, case: Case, layouts: Sequence[Layout], steps: int = 3) -> dict[str, float]:
    """Parameters after steps of Megatron-Core's data parallelism and optimizer, beside torch's AdamW on one process; and the
    norm of the first whole gradient as Megatron-Core counts it."""
    with megatron():
        model, adapters = built(case, ONE)
        parameters = [p for name in adapters.names for p in adapters.parameters(name)]
        optimizer = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        norm = torch.zeros((), dtype=torch.float64)
        for step in range(steps):
            optimizer.zero_grad()
            _loss(model, adapters, case, step).backward()
            if not step:
                norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt()
            optimizer.step()
        wanted = wholes(adapters)
    errors = {}
    for layout in layouts:
        with megatron(layout.tp, layout.ep, layout.etp):
            found, own_norm = _with_megatron(case, layout, steps)
        errors[f"{layout} norm"] = abs(own_norm / float(norm) - 1)
        errors |= {f"{layout} {name}": difference(found[name], tensor) for name, tensor in wanted.items()}
    return errors


def _loss(model: Any, adapters: MegatronAdapters, case: Case, step: int) -> torch.Tensor:
    from megatron.core import parallel_state

    torch.manual_seed(step)
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    with active(adapters, case):
        loss: torch.Tensor = (logits(model, ids_of(), LENGTHS) * weights_of_loss(tp, rank)).sum()
    return loss


def _with_megatron(case: Case, layout: Layout, steps: int) -> tuple[dict[str, torch.Tensor], float]:
    _, adapters, wrapped, optimizer = _optimised(case, layout)
    square = torch.zeros((), dtype=torch.float64)
    for step in range(steps):

        def learn(step: int = step) -> None:
            _loss(wrapped, adapters, case, step).backward()

        _step(wrapped, optimizer, learn, square if not step else None)
    return wholes(adapters), float(square.sqrt())


def _optimised(
    case: Case, layout: Layout, distributed: bool = False, **settings: Any
) -> tuple[Any, MegatronAdapters, Any, Any]:
    """(model, adapters, the model in Megatron-Core's data parallelism with these settings, its optimizer)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, adapters = built(case, layout)
    own = {"use_distributed_optimizer": distributed}
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(**own, **settings), model)
    if settings.get("overlap_param_gather"):
        own["overlap_param_gather"] = True
    config = OptimizerConfig(
        optimizer="adam", lr=0.05, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0,
        params_dtype=torch.float64, log_num_zeros_in_grad=False, **own,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, [wrapped])
    for group in optimizer.param_groups:  # this version's own rule leaves vectors without decay
        group["weight_decay"] = 0.1
    return model, adapters, wrapped, optimizer


def _step(wrapped: Any, optimizer: Any, learn: Callable[[], Any], square: torch.Tensor | None = None) -> None:
    """square: to which that of the whole gradient is added."""
    from megatron.core.distributed import finalize_model_grads

    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    learn()
    finalize_model_grads([wrapped])
    if square is not None:
        square += _square(optimizer)
    optimizer.step()


def replicated(rank: int, folder: str) -> dict[str, float]:
    """Parameters after two steps on two microbatches each, beside torch's AdamW on one process: on two replicas with one
    microbatch each, by several settings; and with the second step in another layout, from a checkpoint."""
    from megatron.core import dist_checkpointing

    two = Case({"a": lora(), "b": lora(use_dora=True)}, ("a", "b", None, "a"))
    errors: dict[str, float] = {}
    settings: dict[str, tuple[Case, dict[str, Any]]] = {
        "plain": (two, {}),
        "distributed": (two, {"distributed": True, "overlap_grad_reduce": True}),
        "gathered": (
            Case({"one": lora()}), {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
        ),
    }  # fmt: skip
    wanted = {id(case): _alone(case) for case, _ in settings.values()}
    for name, (case, own) in settings.items():
        with megatron(), types_of_gpu():
            _, adapters, wrapped, optimizer = _optimised(case, ONE, **own)
            for step in range(2):
                _step(wrapped, optimizer, partial(_own_part, wrapped, adapters, case, step))
            if own.get("overlap_param_gather"):
                wrapped.disable_forward_pre_hook()
            found = wholes(adapters)
        errors |= {f"{name} {key}": difference(found[key], tensor) for key, tensor in wanted[id(case)].items()}
    with megatron():
        model, adapters, wrapped, optimizer = _optimised(two, ONE)
        _step(wrapped, optimizer, partial(_own_part, wrapped, adapters, two, 0))
        states = model.sharded_state_dict()
        if not rank:
            Path(folder).mkdir()
        dist.barrier()
        dist_checkpointing.save({"model": states, "optimizer": optimizer.sharded_state_dict(states)}, folder)
    with megatron(2):
        model, adapters, wrapped, optimizer = _optimised(two, Layout(2, True))
        states = model.sharded_state_dict()
        asked = {"model": states, "optimizer": optimizer.sharded_state_dict(states, is_loading=True)}
        read = dist_checkpointing.load(asked, folder)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
        _step(wrapped, optimizer, partial(_own_part, wrapped, adapters, two, 1))
        found = wholes(adapters)
    return errors | {f"resumed {key}": difference(found[key], tensor) for key, tensor in wanted[id(two)].items()}


def spread(rank: int, cases: Sequence[Case], steps: int = 2) -> dict[str, float]:
    """Parameters after steps on four microbatches each, in layouts with replicas, without and with the distributed optimizer,
    beside torch's AdamW on one process."""
    errors: dict[str, float] = {}
    for case in cases:
        wanted = _alone(case, 4)
        for layout in case.layouts:
            for own in ({}, {"distributed": True, "overlap_grad_reduce": True}):
                with megatron(layout.tp, layout.ep, layout.etp), types_of_gpu():
                    _, adapters, wrapped, optimizer = _optimised(case, layout, **own)
                    for step in range(steps):
                        _step(wrapped, optimizer, partial(_own_part, wrapped, adapters, case, step, 4))
                    found = wholes(adapters)
                errors |= {f"{layout} {own} {key}": difference(found[key], tensor) for key, tensor in wanted.items()}
    return errors


def _alone(case: Case, count: int = 2) -> dict[str, torch.Tensor]:
    """Parameters after two steps of one process, on so many microbatches each."""
    with megatron():
        model, adapters = built(case, ONE)
        parameters = [p for name in adapters.names for p in adapters.parameters(name)]
        optimizer = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for step in range(2):
            optimizer.zero_grad()
            for at in range(count):
                _replica(model, adapters, case, count * step + at).div(count).backward()
            optimizer.step()
        return wholes(adapters)


def _own_part(model: Any, adapters: MegatronAdapters, case: Case, step: int, count: int = 2) -> None:
    """Those of a step's microbatches that are this replica's."""
    from megatron.core import parallel_state

    size, own = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for at in range(own, count, size):
        _replica(model, adapters, case, count * step + at).mul(size / count).backward()


def _replica(model: Any, adapters: MegatronAdapters, case: Case, at: int) -> torch.Tensor:
    y, loss = _microbatch(model, adapters, case, at)
    found: torch.Tensor = loss(y)[0]
    return found


def _square(optimizer: Any) -> torch.Tensor:
    """Of the whole gradient, as Megatron-Core counts it."""
    square = torch.zeros((), dtype=torch.float64)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        one.prepare_grads()
        found = [grad.square().sum() for grad in one.get_main_grads_for_grad_norm()]
        own = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(own, group=one.get_grad_stats_parallel_group())
        square += own
    return square


# --- checkpoints ------------------------------------------------------------------------------------------------------


def kept(rank: int, folder: str, case: Case, first: Layout, others: Sequence[Layout], whole: bool = False) -> list[str]:
    """Names of tensors that other layouts read otherwise than one layout has written them; with layers as Transformer Engine's
    where the case says so, and read by Megatron-Core's own. whole: with the model's, by its own state."""
    from megatron.core import dist_checkpointing

    with megatron(first.tp, first.ep, first.etp):
        model, adapters = built(case, first)
        wanted = wholes(adapters)
        if not rank:
            Path(folder).mkdir()
        dist.barrier()
        dist_checkpointing.save((model if whole else adapters).sharded_state_dict(), folder)
    wrong = []
    for layout in others:
        with megatron(layout.tp, layout.ep, layout.etp):
            model, adapters = built(case, layout, reference=True)
            for name in adapters.names:
                for parameter in adapters.parameters(name):
                    parameter.data.fill_(7.0)
            state = dist_checkpointing.load((model if whole else adapters).sharded_state_dict(), folder)
            (model if whole else adapters).load_state_dict(state)
            found = wholes(adapters)
        wrong += [f"{layout} {name}" for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    return wrong


# --- transformers and PEFT --------------------------------------------------------------------------------------------


def llama_of(model: Any, words: int = WORDS) -> Any:
    """transformers' model with the weights of a whole one of Megatron-Core. words: of its vocabulary, the first ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from packlora.megatron.layers import layers_of
    from packlora.megatron.names import parts_of

    config = LlamaConfig(
        vocab_size=words, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, rope_theta=10000.0, attn_implementation="eager",
        tie_word_embeddings=model.share_embeddings_and_output_weights,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).double().eval()
    state = {}
    for layer in layers_of([model]).values():
        weight = layer.tensor()
        if weight is None:  # that of the embedding
            continue
        for part in parts_of(layer.name, weight.shape[0], model.config):
            state[f"{part.name}.weight"] = weight if part.rows is None else weight[part.rows]
    for at, block in enumerate(model.decoder.layers):
        state[f"model.layers.{at}.input_layernorm.weight"] = block.input_layernorm.weight
        state[f"model.layers.{at}.post_attention_layernorm.weight"] = block.pre_mlp_layernorm.weight
    state["model.norm.weight"] = model.decoder.final_layernorm.weight
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:words]
    llama.load_state_dict({key: value.detach() for key, value in state.items()})
    return llama


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "ffn_hidden_size": 12, "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
SHARED = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}


def hugging_face_state(model: Any) -> dict[str, torch.Tensor]:
    """Weights of a whole model of Megatron-Core by the names of transformers; of norms, the ones in front of its layers and the
    last."""
    from packlora.megatron.layers import layers_of
    from packlora.megatron.names import parts_of
    from packlora.megatron.stacked import place_of

    state: dict[str, torch.Tensor] = {"model.norm.weight": model.decoder.final_layernorm.weight}
    experts: dict[str, list[torch.Tensor]] = {}
    for layer in layers_of([model]).values():
        weight = layer.tensor()
        if place := place_of(layer.name, model.config):
            experts.setdefault(f"{place[0]}.{place[1]}", []).append(weight)
            continue
        for part in parts_of(layer.name, weight.shape[0], model.config):
            state[f"{part.name}.weight"] = weight if part.rows is None else weight[part.rows]
    state |= {name: torch.stack(weights) for name, weights in experts.items()}
    for at, block in enumerate(model.decoder.layers):
        state[f"model.layers.{at}.input_layernorm.weight"] = block.input_layernorm.weight
        state[f"model.layers.{at}.post_attention_layernorm.weight"] = block.pre_mlp_layernorm.weight
    return state


def qwen_of(model: Any) -> Any:
    """transformers' model with the weights of a whole one of Megatron-Core that has EXPERTS and SHARED."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=WORDS, hidden_size=24, moe_intermediate_size=12, shared_expert_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, tie_word_embeddings=False,
        attn_implementation="eager", experts_implementation="eager", num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, qkv_bias=False, decoder_sparse_step=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    qwen = Qwen2MoeForCausalLM(config).double().eval()
    state = hugging_face_state(model)
    for at, block in enumerate(model.decoder.layers):
        state[f"model.layers.{at}.mlp.shared_expert_gate.weight"] = block.mlp.shared_experts.gate_weight
    qwen.load_state_dict({key: value.detach() for key, value in state.items()})
    return qwen


def handed_on_experts(rank: int, folder: str, cases: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Adapters of experts and routers written in several layouts: beside PEFT where it has them, and read again."""
    errors = {}
    for name, one in cases.items():
        settings = EXPERTS | SHARED
        case = Case({"x": one}, model=settings)
        with megatron():
            model, adapters = built(case, ONE)
            qwen, own = qwen_of(model), megatron_logits(model, adapters, "x")
            with mock.patch.object(torch, "float32", torch.float64):  # in which both route
                exact = megatron_logits(model, adapters, "x")
            adapters.merge("x")
            with torch.no_grad():
                errors[f"{name} merged"] = difference(joined_words(logits(model, ids_of(), LENGTHS)), own)
            adapters.unmerge()
        for at, layout in enumerate((ONE, Layout(2, True, 2))):
            place = f"{folder}/{name}-{at}"
            with megatron(layout.tp, layout.ep, layout.etp):
                _, adapters = built(case, layout)
                adapters.save(place, "x")
                model = model_of(tp=layout.tp, sequence=layout.sequence, ep=layout.ep, etp=layout.etp, **settings)
                again = apply_lora(model, {"x": place})
                errors[f"{name} read at {layout}"] = difference(megatron_logits(model, again, "x"), own)
            if not at and not one.get("use_dora"):  # PEFT has none on experts
                errors[f"{name} in PEFT"] = difference(peft_logits(qwen, place), exact)
                if one.get("alpha_pattern"):
                    errors[f"{name} without alpha_pattern"] = _unseen(qwen, folder, f"{name}-{at}", exact)
            files = [Path(f"{folder}/{name}-{number}", "adapter_model.safetensors").read_bytes() for number in (0, at)]
            errors[f"{name} written at {layout}"] = float(files[0] != files[1])
    return errors


def peft_logits(llama: Any, folder: str, words: int = WORDS) -> torch.Tensor:
    """Of each sample alone, with an adapter's folder on a copy of the model. words: of which tokens are."""
    import copy

    from peft import PeftModel

    model = PeftModel.from_pretrained(copy.deepcopy(llama), folder, autocast_adapter_dtype=False).double().eval()
    # in which norms and softmax are computed
    softmax = torch.nn.functional.softmax
    routed = mock.patch.object(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim))
    with torch.no_grad(), mock.patch.object(torch, "float32", torch.float64), routed:
        packed = zip(
            (ids_of() % words).split(LENGTHS, 1), torch.arange(sum(LENGTHS))[None].split(LENGTHS, 1), strict=True
        )
        return torch.cat([model(input_ids=ids, position_ids=at).logits for ids, at in packed], 1)


def megatron_logits(model: Any, adapters: MegatronAdapters, name: str, words: int = WORDS) -> torch.Tensor:
    with torch.no_grad(), adapters.active(adapters.owners([(name, count) for count in LENGTHS])):
        return joined_words(logits(model, ids_of() % words, LENGTHS))


def handed_on(rank: int, folder: str, case: Case, layout: Layout) -> dict[str, float]:
    """Adapters written in one layout, beside PEFT; and read again in others, merged, if they can be, and unmerged."""
    errors = {}
    with megatron():
        llama = llama_of(built(case, ONE)[0])
    with megatron(layout.tp):
        model, adapters = built(case, layout)
        own = {name: megatron_logits(model, adapters, name) for name in adapters.names}
        frozen = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        for name in adapters.names:
            adapters.save(f"{folder}/{name}", name, "a/model")
            if case.adapters[name].get("alpha_pattern"):
                errors[f"{name} without alpha_pattern"] = _unseen(llama, folder, name, own[name])
            errors[f"{name} in PEFT"] = difference(own[name], peft_logits(llama, f"{folder}/{name}"))
            if case.model.get("tied"):
                continue
            adapters.merge(name)
            with torch.no_grad():
                merged = joined_words(logits(model, ids_of(), LENGTHS))
            errors[f"{name} merged"] = difference(merged, own[name])
            adapters.unmerge()
            kept = all(torch.equal(frozen[key], value) for key, value in model.state_dict().items() if key in frozen)
            errors[f"{name} unmerged"] = 0.0 if kept else 1.0
    for other in (ONE, Layout(2, True)):
        with megatron(other.tp):
            model = model_of(tp=other.tp, sequence=other.sequence, **case.model)
            adapters = apply_lora(model, {name: f"{folder}/{name}" for name in case.adapters})
            for name in adapters.names:
                error = difference(megatron_logits(model, adapters, name), own[name])
                errors[f"{name} read at {other}"] = error
    return errors


def _unseen(llama: Any, folder: str, name: str, wanted: torch.Tensor) -> float:
    """Whether ranks by layer without their alphas, which change scalings, would not be seen."""
    path = Path(folder, name, "adapter_config.json")
    text = path.read_text()
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(json.loads(text) | {"alpha_pattern": {}}))
    dist.barrier()
    error = difference(peft_logits(llama, str(path.parent)), wanted)
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_text(text)
    dist.barrier()
    return 0.0 if error > 1e-3 else 1.0


DEEPSEEK: dict[str, Any] = EXPERTS | {
    "moe_shared_expert_intermediate_size": 12, "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}  # fmt: skip


def deepseek_of(model: Any, query_rank: int | None, dense: bool) -> Any:
    """transformers' model with the weights of a whole one of Megatron-Core that has multi-latent attention."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=WORDS, hidden_size=24, intermediate_size=20, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=2 if dense else 0, routed_scaling_factor=1.0, q_lora_rank=query_rank,
        kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6, rms_norm_eps=1e-5, rope_theta=10000.0,
        attn_implementation="eager", experts_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    deepseek = DeepseekV3ForCausalLM(config).double().eval()
    state = hugging_face_state(model)
    for at, block in enumerate(model.decoder.layers):
        path, attention = f"model.layers.{at}", block.self_attention
        state[f"{path}.self_attn.kv_a_layernorm.weight"] = attention.kv_layernorm.weight
        if query_rank:
            state[f"{path}.self_attn.q_a_layernorm.weight"] = attention.q_layernorm.weight
        if not dense:
            state[f"{path}.mlp.gate.e_score_correction_bias"] = torch.zeros(4, dtype=torch.float64)
    deepseek.load_state_dict({key: value.detach() for key, value in state.items()})
    return deepseek


def latent(rank: int, folder: str) -> dict[str, float]:
    """Adapters on multi-latent attention, and on experts and shared experts beside it: in PEFT, and read again."""
    errors: dict[str, float] = {}
    attention = ["linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
    cases: dict[str, tuple[int | None, dict[str, Any], dict[str, Any]]] = {
        "queries": (None, {}, lora(target_modules=["linear_q_proj", *attention])),
        "DoRA": (8, {}, lora(target_modules=["linear_q_down_proj", "linear_q_up_proj", *attention], use_dora=True)),
        "experts": (8, DEEPSEEK, lora(target_modules=["linear_q_up_proj", "linear_fc1", "linear_fc2", "router"])),
    }
    for name in cases if SOAK else ["experts"]:
        query_rank, settings, one = cases[name]
        with megatron():
            model = latent_model(query_rank, **settings)
            deepseek = deepseek_of(model, query_rank, not settings)
            adapters = apply_lora(model, {"x": LoraConfig(**one)})
            randomise(adapters)
            with mock.patch.object(torch, "float32", torch.float64), types_of_gpu():  # in which both route
                wanted = megatron_logits(model, adapters, "x")
            adapters.save(f"{folder}/{name}", "x")
            errors[f"{name} in PEFT"] = difference(peft_logits(deepseek, f"{folder}/{name}"), wanted)
            model = latent_model(query_rank, **settings)
            again = apply_lora(model, {"x": f"{folder}/{name}"})
            with mock.patch.object(torch, "float32", torch.float64), types_of_gpu():
                errors[f"{name} read"] = difference(megatron_logits(model, again, "x"), wanted)
    return errors


def taken_over(rank: int, folder: str) -> dict[str, float]:
    """PEFT's own adapters, with an A, a rank and a scaling for each of q, k, v, gate and up: read, and written again."""
    from peft import get_peft_model

    errors = {}
    with megatron():
        llama = llama_of(model_of())
    words = ["embed_tokens", "lm_head"]  # PEFT copies their weights into the file
    for dora, targets in ((False, ["q_proj", "v_proj", "gate_proj", "down_proj", *words]), (True, "all-linear")):
        at = f"{folder}/{dora}"
        config = LoraConfig(
            r=2, lora_alpha=6, target_modules=targets, use_dora=dora, task_type="CAUSAL_LM",
            rank_pattern={"v_proj": 3, "gate_proj": 1}, alpha_pattern={"v_proj": 2, "down_proj": 5},
            init_lora_weights=dora,
        )  # fmt: skip
        if not rank:
            import copy

            model = get_peft_model(copy.deepcopy(llama), config, autocast_adapter_dtype=False).double()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    generator = torch.Generator().manual_seed(hash_of(name))
                    value = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                    parameter.data = value.abs() + 1 if "magnitude" in name else value * 0.3
            model.save_pretrained(at)
        dist.barrier()
        wanted = peft_logits(llama, at)
        for layout in (ONE, Layout(2, True)):
            with megatron(layout.tp):
                own = model_of(tp=layout.tp, sequence=layout.sequence)
                adapters = apply_lora(own, {"x": at})
                errors[f"DoRA {dora} at {layout}"] = difference(megatron_logits(own, adapters, "x"), wanted)
                adapters.save(f"{at}-again-{layout.tp}", "x")
                again = peft_logits(llama, f"{at}-again-{layout.tp}")
                errors[f"DoRA {dora} written at {layout}"] = difference(again, wanted)
    return errors


def padded(rank: int, folder: str) -> dict[str, float]:
    """An adapter on words of a vocabulary that is smaller than Megatron's: in PEFT, and read again."""
    case, errors = Case({"x": lora(target_modules=["word_embeddings", "output_layer"])}), {}
    with megatron():
        model, adapters = built(case, ONE)
        adapters.save(folder, "x", vocab_size=WORDS - 3)
        wanted = wholes(adapters)
        own = megatron_logits(model, adapters, "x", WORDS - 3)[..., : WORDS - 3]
        errors["in PEFT"] = difference(peft_logits(llama_of(model, WORDS - 3), folder, WORDS - 3), own)
    for layout in (ONE, Layout(2, True)):
        with megatron(layout.tp):
            read = apply_lora(model_of(tp=layout.tp, sequence=layout.sequence), {"x": folder})
            for name, tensor in wholes(read).items():
                cut = wanted[name].clone()
                if "output_layer" in name and not name.endswith("A"):
                    cut[WORDS - 3 :] = 0
                elif "word_embeddings" in name and name.endswith("A"):
                    cut[:, WORDS - 3 :] = 0
                errors[f"{name} at {layout}"] = difference(tensor, cut)
    return errors


def fewer_words(rank: int, folder: str, words: int) -> dict[str, torch.Tensor]:
    """Whole tensors of an adapter on the words that two processes' vocabulary was padded to, and what one process reads of
    their checkpoint, whose vocabulary has so many."""
    from megatron.core import dist_checkpointing

    case = Case(
        {"x": lora(target_modules=["word_embeddings"]), "y": lora(target_modules=["output_layer"], use_dora=True)}
    )
    with megatron(2):
        _, adapters = built(case, Layout(2, True))
        found = {f"two {key}": value for key, value in wholes(adapters).items()}
        if not rank:
            Path(folder).mkdir()
        dist.barrier()
        dist_checkpointing.save(adapters.sharded_state_dict(), folder)
    with megatron():
        _, adapters = built(Case(case.adapters, model={"words": words}), ONE)
        for parameter in [*adapters.parameters("x"), *adapters.parameters("y")]:
            parameter.data.fill_(7.0)
        adapters.load_state_dict(dist_checkpointing.load(adapters.sharded_state_dict(), folder))
        return found | {f"one {key}": value for key, value in wholes(adapters).items()}


def tied_stages(rank: int) -> list[str]:
    """What each of two stages says where an adapter on the embedding, or on the output layer that is tied to it, is to be
    merged."""
    said = []
    with megatron(pp=2):
        for own in ("word_embeddings", "output_layer"):
            case = Case({"x": lora(target_modules=[own, "linear_fc2"])}, model={"tied": True})
            adapters = apply_lora(stages(rank, case, 1), {"x": LoraConfig(**case.adapters["x"])})
            said.append(_said(lambda adapters=adapters: adapters.merge("x")))  # type: ignore[misc]
    return said


def damaged(rank: int, folder: str) -> dict[str, str]:
    """What is said to a folder with one thing wrong, and to a state that is not of the adapters."""
    from safetensors.torch import load_file, save_file

    case, file = Case({"x": lora(use_dora=True)}), Path(folder) / "adapter_model.safetensors"
    q, down = "base_model.model.model.layers.0.self_attn.q_proj.", "base_model.model.model.layers.1.mlp.down_proj."
    B, A, m = f"{q}lora_B.weight", f"{down}lora_A.weight", f"{q}lora_magnitude_vector.weight"
    changes: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "nan": (m, lambda one: one * torch.nan), "infinite": (B, lambda one: one / 0), "whole": (B, lambda one: one.int()),
        "one row": (B, lambda one: one[:1]), "one number": (m, lambda one: one[:1]), "flat": (B, torch.flatten),
        "a column more": (A, lambda one: torch.cat([one, one[:, :1]], 1)),
    }  # fmt: skip
    said = {}

    def ask(name: str, call: Callable[[], Any]) -> None:
        said[name] = _said(call)

    with megatron(2):
        _, adapters = built(case, Layout(2))
        adapters.save(folder, "x")
        sound = load_file(file)
        for name, (key, change) in changes.items():
            dist.barrier()
            if not rank:
                save_file(sound | {key: change(sound[key]).contiguous()}, file)
            dist.barrier()
            ask(name, lambda: apply_lora(model_of(tp=2), {"x": folder}))
        state = {key: torch.zeros(1) for key in adapters.sharded_state_dict()}
        ask("empty", lambda: adapters.load_state_dict({}))
        ask("foreign", lambda: adapters.load_state_dict(state | {"decoder.lora_A_y": torch.zeros(1)}))
        ask("partial", lambda: adapters.load_state_dict(dict(list(state.items())[1:])))
        ask("less than none", lambda: adapters.owners([("x", 5), ("x", -2)]))
    experts = "base_model.model.model.layers.1.mlp.experts.lora_"
    with megatron(1, 2):
        _, adapters = built(
            Case({"x": lora(target_modules=["linear_fc1", "linear_fc2"])}, model=EXPERTS), Layout(1, False, 2)
        )
        adapters.save(folder, "x")
        sound, A = load_file(file), f"{experts}A.weight"
        changed = {
            "an expert's row": sound | {A: sound[A][1:]},
            "one weight": {key: tensor for key, tensor in sound.items() if not key.startswith(experts)},
        }
        for name, tensors in changed.items():
            dist.barrier()
            if not rank:
                save_file(tensors, file)
            dist.barrier()
            ask(name, lambda: apply_lora(model_of(ep=2, **EXPERTS), {"x": folder}))
        dist.barrier()
        if not rank:
            save_file({key: tensor.contiguous() for key, tensor in _one_by_one(sound, 4, 3).items()}, file)
        dist.barrier()
        found = wholes(apply_lora(model_of(ep=2, **EXPERTS), {"x": folder}))
        same = all(torch.equal(found[key], tensor) for key, tensor in wholes(adapters).items())
        said["one by one"] = "the same" if same else "others"
    return said


def _one_by_one(stacked: Mapping[str, torch.Tensor], experts: int, rank: int) -> dict[str, torch.Tensor]:
    """Tensors of all experts under the names that each of them had in transformers 4."""
    out: dict[str, torch.Tensor] = {}
    for key, tensor in stacked.items():
        head, _, end = key.partition(".mlp.experts.")
        inner = end.startswith("base_layer.")
        for number in range(experts):
            at = f"{head}.mlp.experts.{number}"
            own = (
                tensor.unflatten(0, (experts, rank))[number]
                if "lora_A" in end
                else tensor.unflatten(1, (rank, experts))[..., number]
            )
            leaf = end.removeprefix("base_layer.")
            halves = [own, own] if "lora_A" in end else own.chunk(2)
            if inner:
                out |= {
                    f"{at}.{name}.{leaf}": half for name, half in zip(("gate_proj", "up_proj"), halves, strict=True)
                }
            else:
                out[f"{at}.down_proj.{leaf}"] = own
    return {key: tensor.clone() for key, tensor in out.items()}


# --- what must be seen ------------------------------------------------------------------------------------------------


def broken(rank: int) -> dict[str, float]:
    """By fault that was put in on purpose, the largest difference that the comparisons above show."""
    from megatron.core.tensor_parallel import mappings

    from packlora.adapters.owners import TokenOwners
    from packlora.adapters.weights import AdapterWeights
    from packlora.megatron import attach, forward, layers

    enter_of, part = layers.enter_of, TokenOwners.part

    def summed_twice(layer: Any) -> Any:
        enter = enter_of(layer)
        if not layer.sequence or layer.dim != 0 or enter is None:
            return enter
        return lambda x: mappings.copy_to_tensor_model_parallel_region(enter(x), group=layer.group)

    def local_mask(linear: Any) -> int:
        return 0

    one = Case({"one": lora()}, layouts=(Layout(2, True),))
    dora = Case({"one": lora(use_dora=True)}, layouts=(Layout(2),))
    dropped = Case({"one": lora(lora_dropout=0.2)}, ("one",) * 4, layouts=(Layout(2),))
    router = lora(target_modules=["router"])
    routed = Case({"a": router, "b": router}, ("a", "b", "a", None), _MOE, (Layout(2, True),))
    draw, mark = partial(mock.patch.object, AdapterWeights), attach._mark

    def unmarked(parameter: Any, key: str, layer: Any) -> None:
        if layer.dim is not None:
            mark(parameter, key, layer)

    mixed = Case({"one": lora(target_modules=["mix"])}, model={"mixed": True}, layouts=(Layout(2, True),))
    faults: dict[str, tuple[Case, list[Any]]] = {
        "gradient of a column's input added up twice": (one, [mock.patch.object(forward, "enter_of", summed_twice)]),
        "first values by slice": (
            one,
            [draw("whole_shape", lambda self, name, shape: tuple(shape)), draw("own", lambda self, name, whole: whole)],
        ),
        "gradients of whole layers left apart": (mixed, [mock.patch.object(attach, "_mark", unmarked)]),
        "the mean of parts": (one, [mock.patch.object(attach._Times, "__call__", lambda self, gradient: gradient)]),
        "local row norms": (dora, [mock.patch.object(layers, "_add_up")]),
        "masks of slices alike": (
            dropped,
            [mock.patch("packlora.adapters.sharded.AdaptedSlice.first_feature", property(local_mask))],
        ),
        "owners of other tokens": (
            routed,
            [mock.patch.object(TokenOwners, "part", lambda whole, start, stop: part(whole, 0, stop - start))],
        ),
    }  # fmt: skip
    found = {}
    for name, (case, patches) in faults.items():
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            [errors] = compared(rank, [case])
        found[name] = max(errors.values())
    found["experts over the wrong group"] = _wrong_group(rank)
    return found


_MOE = {
    "num_layers": 1, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip


def _wrong_group(rank: int) -> float:
    from packlora.megatron import attach

    mark = attach._mark

    def as_dense(parameter: Any, key: str, layer: Any) -> None:
        mark(parameter, key, layer)
        parameter.allreduce = True

    case = Case({"one": lora(target_modules=["linear_fc1"])}, model=_MOE)
    with mock.patch.object(attach, "_mark", as_dense):
        errors = stepped(rank, case, [Layout(1, False, 2)], steps=1)
    return max(errors.values())


def unseen_writes(rank: int) -> tuple[float, float]:
    """A DoRA adapter's change of logits after writes that move no version, as Megatron-Core's optimizers make, beside that
    after writes which do; and after an optimizer's step that was none of its own."""
    with megatron():
        case = Case({"one": lora(use_dora=True)})
        model, adapters = built(case, ONE)
        megatron_logits(model, adapters, "one")
        for parameter in adapters.parameters("one"):
            parameter.data.mul_(1.5)
        other = torch.nn.Parameter(torch.ones(1))
        other.grad = torch.ones(1)
        torch.optim.SGD([other], lr=0.1).step()
        found = megatron_logits(model, adapters, "one")
        again, new = built(case, ONE)
        with torch.no_grad():
            for parameter in new.parameters("one"):
                parameter.mul_(1.5)
        return difference(found, megatron_logits(again, new, "one")), difference(
            found, megatron_logits(*built(case, ONE), "one")
        )


def recomputed(rank: int) -> dict[str, float]:
    """Gradients under recomputation of whole layers, beside those without: masks drawn, and masks by owners' keys."""
    errors = {}
    again: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for owners in (None, ("one", None, "one", "one")):
        for layout in (ONE, Layout(2, True)):
            case = Case({"one": lora(lora_dropout=0.2)}, owners)
            with megatron(layout.tp):
                y, grads = learnt(case, layout)
            with megatron(layout.tp):
                own_y, own = learnt(Case(case.adapters, owners, again), layout)
            errors[f"{owners} {layout} logits"] = difference(own_y, y)
            errors |= {f"{owners} {layout} {name}": difference(own[name], grads[name]) for name in grads}
    return errors


def _said(call: Callable[[], Any]) -> str:
    from packlora.errors import InputError

    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing"


def refusals(rank: int, folder: str) -> dict[str, str]:
    """What is said to what is not supported."""
    from packlora.config import AdapterConfig
    from packlora.megatron import attach, targets

    said = {}
    with megatron():

        def ask(name: str, config: Any, given: Any = None, **model: Any) -> None:
            said[name] = _said(lambda: apply_lora(model_of(**model) if given is None else given, config))

        ask("target", LoraConfig(target_modules=["linear_qkvs"]))
        ask("half", LoraConfig(target_modules=["q_proj", "v_proj"]))
        ask("bias", LoraConfig(target_modules="all-linear", bias="all"))
        ask("start", LoraConfig(target_modules="all-linear", init_lora_weights="pissa"))
        ask("pattern", LoraConfig(target_modules=["linear_qkv"], rank_pattern={"linear_fc1": 2}))
        ask("embedding", LoraConfig(target_modules=["word_embeddings"], use_dora=True))
        ask("name", {"a.b": LoraConfig(target_modules="all-linear")})
        ask("none", {})
        ask("kind", {"a": 3})
        ask("folder", str(Path(folder) / "nothing"))
        with mock.patch.dict(attach.ELSEWHERE, {"MLP": "nothing"}):
            ask("fused", LoraConfig(target_modules="all-linear"))
        graphed = model_of()
        graphed.config.cuda_graph_impl = "local"
        ask("graph", LoraConfig(target_modules="all-linear"), given=graphed)
        ask("tied", LoraConfig(target_modules=["output_layer"]), tied=True)
        alike = {"target_modules": ["linear_fc1"], "rank_pattern": {"local_experts.3.linear_fc1": 4}}
        ask("unlike experts", LoraConfig(**alike), **EXPERTS)
        ask("some experts", LoraConfig(target_modules=["local_experts.1.linear_fc1"]), **EXPERTS)
        ask("no experts", AdapterConfig(expert_rank="r // top_k", target_modules=["linear_qkv"]), **EXPERTS)
        ask("no multiple", AdapterConfig(r=3, expert_rank="r // top_k", target_modules=["linear_fc1"]), **EXPERTS)
        ask("exclusion", LoraConfig(target_modules="all-linear", exclude_modules=["o_proj"]))
        ask("layers", LoraConfig(target_modules=["linear_qkv"], layers_to_transform=[0, 7]))
        rest = apply_lora(model_of(), LoraConfig(target_modules="all-linear", exclude_modules=["linear_proj"]))
        ahead = {"decoder.layers.0.mlp.linear_fc1": "linear", "mtp.layers.0.eh_proj": "linear"}
        said["ahead"] = " ".join(targets._chosen(LoraConfig(target_modules="all-linear"), ahead, "a"))
        said["rest"] = " ".join(sorted({path.rpartition(".")[2] for path in rest.specs("default")}))
        apart = model_of(**EXPERTS)
        apart.decoder.layers[1].mlp.router.to("meta")
        ask("apart", LoraConfig(target_modules=["linear_qkv"]), given=apart)
        moved = model_of()
        apply_lora(moved, LoraConfig(target_modules=["linear_qkv"]))
        moved.to("meta")
        said["moved"] = _said(lambda: moved(ids_of().to("meta"), None, None))
        _, on_words = built(Case({"a": lora(target_modules=["word_embeddings"])}, model={"tied": True}), ONE)
        said["tied words"] = _said(lambda: on_words.merge("a"))
        model, adapters = built(Case({"a": lora(), "b": lora()}), ONE)
        ask("twice", LoraConfig(target_modules="all-linear"), given=model)
        said["owner"] = _said(lambda: adapters.owners([("c", 3)]))
        adapters.merge("a")
        said["merged"] = _said(lambda: adapters.merge("b"))
        said["saved"] = _said(lambda: adapters.save(folder, "b"))
        said["state"] = _said(lambda: adapters.sharded_state_dict("b"))
    return said


def around(rank: int) -> dict[str, Any]:
    """Of adapters on a model in a Float16Module, and of merged ones, what states hold and what learns; and whether routers of
    other models are left alone."""
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter

    narrow: dict[str, Any] = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
    again: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found: dict[str, Any] = {}
    with megatron():
        model = model_of(**narrow, **again)
        wrapped = Float16Module(model.config, model)
        adapters = apply_lora(wrapped, LoraConfig(**lora()))
        parameters = adapters.parameters("default")
        found["state"] = (len(adapters.sharded_state_dict()), len(parameters))
        logits(wrapped, ids_of(), LENGTHS).float().sum().backward()
        found["learns"] = all(parameter.grad is not None for parameter in parameters)
        model, adapters = built(Case({"one": lora()}), ONE)
        base = {key for key in model.sharded_state_dict() if "lora_" not in key}
        adapters.merge("one")
        found["merged"] = model.sharded_state_dict().keys() == base
        adapters.unmerge()
        found["unmerged"] = len(model.sharded_state_dict()) - len(base)
        gating, other = TopKRouter.gating, model_of(**EXPERTS)
        built(Case({"one": lora(target_modules=["router"])}, model=EXPERTS), ONE)
        found["routers"] = TopKRouter.gating is gating and "gating" not in vars(other.decoder.layers[0].mlp.router)
    return found


def documented(rank: int, folder: str, page: str) -> dict[str, Any]:
    """What the code of a page leaves, in the order in which it stands there."""
    from megatron.core import parallel_state

    code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    found: dict[str, Any] = {}
    nothing, itself = (lambda *args, **kwargs: None), (lambda self, *args, **kwargs: self)
    with megatron(2), types_of_gpu(), ExitStack() as stack:
        for owner, name, call in (
            (torch.cuda, "set_device", nothing), (dist, "init_process_group", nothing),
            (parallel_state, "initialize_model_parallel", nothing), (torch.Tensor, "cuda", itself),
            (torch.nn.Module, "cuda", itself),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, call))
        Path(folder).mkdir(exist_ok=True)
        stack.enter_context(contextlib.chdir(folder))
        exec(compile(code, "page", "exec"), found)
    return {"losses": found["losses"], "files": sorted(path.name for path in Path(folder).iterdir())}


def sent(rank: int) -> dict[str, tuple[list[str], float, list[str], float]]:
    """Collectives and bytes of a forward and backward of a frozen model, and of one with LoRA, DoRA and dropout."""
    from benchmarks.megatron import by_name
    from benchmarks.processes import counted

    found = {}
    for layout in DENSE:
        counts: list[Any] = []
        for case in (None, Case({"a": lora(lora_dropout=0.1), "b": lora(use_dora=True)}, ("a", "b", None, "a"))):
            with megatron(layout.tp):
                model = model_of(tp=2, sequence=layout.sequence)
                model.requires_grad_(False)
                adapters = None if case is None else built(case, layout)
                model = model if adapters is None else adapters[0]
                model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
                with active(adapters[1], case) if adapters is not None and case is not None else nullcontext():
                    logits(model, ids_of(), LENGTHS).sum().backward()  # DoRA's norms are made once for many
                    with by_name(), counted() as messages:
                        logits(model, ids_of(), LENGTHS).sum().backward()
                counts += [messages.names, messages.sent]
        found[str(layout)] = tuple(counts)
    return found


def divided(rank: int) -> tuple[int, float, int, float]:
    """Ranks and scalings of an expert, and of attention, where that of experts is divided by the experts of a token."""
    from packlora.config import AdapterConfig

    with megatron(1, 2):
        config = AdapterConfig(
            r=6, lora_alpha=9, use_rslora=True, expert_rank="r // top_k", target_modules=["linear_fc1", "linear_qkv"]
        )
        specs = apply_lora(model_of(ep=2, **EXPERTS), config).specs("default")
    [expert] = {(spec.rank, spec.scaling) for path, spec in specs.items() if "experts" in path}
    [other] = {(spec.rank, spec.scaling) for path, spec in specs.items() if "experts" not in path}
    return *expert, *other


def benched(rank: int, out: Path) -> int:
    from benchmarks.__main__ import main

    with megatron():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        try:
            return main(["megatron", "--quick", "--device", "cpu", "--out", str(out)])
        finally:
            parallel_state.initialize_model_parallel()


def staged(rank: int, folder: str, case: Case, chunks: int = 1, cut: str | None = None) -> list[str]:
    """Names of tensors that two stages, of so many chunks each, have otherwise than one process; by first values, by a
    checkpoint that one process reads, by a folder and what is read of it. Some targets and patterns are of one stage alone.

    cut: what each stage has, E embedding, t layer, L loss; None: as many layers."""
    from megatron.core import dist_checkpointing

    with megatron():
        _, adapters = built(case, ONE)
        wanted = wholes(adapters)
        adapters.save(f"{folder}/one", "one")
    with megatron(pp=2, vpp=chunks if chunks > 1 else None):
        adapters = apply_lora(
            stages(rank, case, chunks, cut), {name: LoraConfig(**one) for name, one in case.adapters.items()}
        )
        randomise(adapters)
        found = wholes(adapters)
        adapters.save(f"{folder}/two", "one")
        if not rank:
            Path(folder, "state").mkdir()
        dist.barrier()
        dist_checkpointing.save(adapters.sharded_state_dict(), f"{folder}/state")
        again = apply_lora(stages(rank, case, chunks, cut), {"one": f"{folder}/two"})
        read = megatron_names(again)
    with megatron():
        _, whole = built(case, ONE)
        for parameter in whole.parameters("one"):
            parameter.data.fill_(7.0)
        whole.load_state_dict(dist_checkpointing.load(whole.sharded_state_dict(), f"{folder}/state"))
        kept = wholes(whole)
    files = [Path(folder, part, "adapter_model.safetensors").read_bytes() for part in ("one", "two")]
    wrong = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    wrong += [f"state {name}" for name, tensor in wanted.items() if not torch.equal(kept[name], tensor)]
    return wrong + (["file"] if files[0] != files[1] else []) + (["read"] if read != megatron_names(adapters) else [])


def stages(rank: int, case: Case, chunks: int, cut: str | None = None) -> list[Any]:
    """This process's part of two that have so many chunks each. cut: see staged."""
    others: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": cut}
    if chunks > 1:
        others |= {"virtual_pipeline_model_parallel_size": chunks, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    with mock.patch.object(torch.Tensor, "cuda", lambda self, *args, **kwargs: self):
        models = [
            model_of(stage=rank + 2 * at, stages=2 * chunks, chunk=at, **case.model | others) for at in range(chunks)
        ]
    if case.model.get("tied"):
        dist.broadcast(models[0].shared_embedding_or_output_weight().data, 0)
    return models


def piped(rank: int, cases: Mapping[str, Case]) -> dict[str, float]:
    """Gradients of Megatron-Core's own schedule over two stages beside those of one process: 1F1B with three microbatches; with
    two chunks a process interleaved, with four."""
    errors: dict[str, float] = {}
    for name, case in cases.items():
        chunks = case.model.get("num_layers", 2) // 2
        count = 3 if chunks == 1 else 4
        with megatron():
            model, adapters = built(case, ONE)
            for at in range(count):
                y, loss = _microbatch(model, adapters, case, at)
                (loss(y)[0] / count).backward()
            wanted = whole_gradients(adapters)
        with megatron(pp=2, vpp=chunks if chunks > 1 else None):
            found = _scheduled(rank, case, chunks, count)
        errors |= {f"{name} {key}": difference(found[key], tensor) for key, tensor in wanted.items()}
    return errors


def _microbatch(model: Any, adapters: MegatronAdapters, case: Case, at: int) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Outputs of a microbatch, and their loss."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(10 + at)
    ids = torch.randint(WORDS, (1, sum(LENGTHS)), generator=generator)
    weights = torch.randn(1, sum(LENGTHS), WORDS, dtype=torch.float64, generator=generator)
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    weights = weights.chunk(size, -1)[rank]
    own = None if case.owners is None else case.owners[at:] + case.owners[:at]
    with active(adapters, Case(case.adapters, own)):
        return logits(model, ids, LENGTHS), lambda y: ((y * weights).sum(), {})


def _scheduled(rank: int, case: Case, chunks: int, count: int) -> dict[str, torch.Tensor]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    models = stages(rank, case, chunks)
    adapters = apply_lora(models, {name: LoraConfig(**one) for name, one in case.adapters.items()})
    randomise(adapters)

    def step(numbers: Iterator[int], model: Any) -> Any:
        return _microbatch(model, adapters, case, next(numbers))

    numbers = [iter(range(count)) for _ in models]
    get_forward_backward_func()(
        forward_step_func=step, data_iterator=numbers if chunks > 1 else numbers[0], model=models, num_microbatches=count,
        seq_length=sum(LENGTHS), micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return whole_gradients(adapters)


def megatron_names(adapters: MegatronAdapters) -> list[str]:
    return [f"{path}/{key}" for path, key, _ in named(adapters, adapters.names[0])]
