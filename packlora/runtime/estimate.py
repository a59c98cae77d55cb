"""Estimates of what a microbatch costs in time and memory: products and bytes are counted, on one device, or on devices that
share out experts. Neither a GPU nor the weights are needed; one short matrix product tells how fast the machine is.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from packlora.base.device import choose_device
from packlora.config import Run
from packlora.engine.memory import memory_room
from packlora.ops.cross_entropy.linear_cross_entropy import CHUNK_BYTES, chunk_rows
from packlora.ops.gpu import runs_triton, why_no_kernels
from packlora.runtime.machine_speed import machine_bandwidth, machine_flops
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.schedule.cost import CostModel

PRODUCTS_SHARE = {"cuda": 0.8, "cpu": 0.55, "mps": 0.8}
"""Speed of a model's matrix products over that of large square ones: four jobs on 0.6B's and 8B's shapes on an H200. Of a CPU,
the part of a whole step that they would take at that speed: SmolLM2-135M on two cores."""
PASSES = 3, 7
"""How often forward and backward on a GPU read or write what goes into and comes out of linear layers, beside the products:
norms, activations, rotations, sums, the products with narrow adapters. Four jobs on the same shapes."""
PLANNED_FLOPS = {"cuda": 4e14, "cpu": 1e11, "mps": 4e12}
"""FLOP/s that schedules of a pipeline and layouts are planned for, on any machine. It sets what is fixed for a microbatch
against what its tokens take."""
LAYER_SECONDS = {"cuda": 5e-5, "cpu": 3e-4, "mps": 3e-4}
"""Least seconds of the forward of a decoder layer, however few its tokens are."""
OPTIMIZER_BYTES, TRAINABLE_BYTES, GRADIENT_BYTES = 16, 4 * 5, 4
"""Per trainable parameter: the gradient of a global batch, two moments and the last good value; with its own value; a
microbatch's gradient, which is whole when one layer's activations are left."""
LIBRARY_BYTES, RECORDING_BYTES = 72 * 2**20, 64 * 2**20
"""Workspaces of cuBLAS, and small tensors; and its workspaces of the stream on which CUDA graphs are recorded."""
RANK_MULTIPLE = 16
"""Kernels pad ranks to multiples of it."""
INPUTS_ON_DEVICE = 3
"""Inputs of layers that are on the device at a time where they are kept on the host: of base/activation_offloading.py."""
BYTES_PER_SECOND = 2e11
"""Assumed of messages between devices: four H200s gather a layer by NVLink at 2.1e11 to 2.5e11."""
ATTENTION_SLOWER = 2.5
"""Attention's products against large plain ones, time per operation."""


def estimate(run: Run, prepared: PreparedRun) -> Profile:
    """Estimate from shapes alone and the speed of the machine at one matrix product and one copy."""
    device = choose_device(run.device)
    least, many, twice = (sum(memory_parts(run, prepared, tokens).values()) for tokens in (1, 2**16, 2**17))
    per_token = (twice - many) / 2**16  # no fewer tokens have more each, so that the line is nowhere below the parts
    kept = least - per_token
    cost = analytic_cost(run, prepared, *speed(run))
    return Profile("estimated", cost, kept, per_token, memory_room(device))


def planning_cost(run: Run, prepared: PreparedRun, experts_on: int = 1) -> CostModel:
    """Cost of a microbatch for the planner and for the choice of a layout: the same on every machine, so that all processes
    of a run find the same, and a resumed run too."""
    return analytic_cost(run, prepared, PLANNED_FLOPS[choose_device(run.device).type], experts_on=experts_on)


def speed(run: Run) -> tuple[float, float]:
    """Speed of the machine at a model's matrix products and in memory: FLOP/s, and bytes that are read or written a second."""
    device = choose_device(run.device)
    return machine_flops(device, run.dtype) * PRODUCTS_SHARE[device.type], machine_bandwidth(device)


def analytic_cost(
    run: Run, prepared: PreparedRun, flops: float, bandwidth: float = math.inf, *, experts_on: int = 1
) -> CostModel:
    """Seconds of a microbatch on machines of so many FLOP/s.

    Forward: two operations per weight of the linear layers and of a token's own adapter, causal attention, and the output layer
    at the label tokens. Backward: frozen weights take no gradient, adapters do; checkpointing runs the layers again. Where
    experts are shared out to devices, each computes its share of what goes to them, and what they give is added up.

    Args:
        bandwidth: bytes a second that memory reads or writes; without it only products take time.
        experts_on: devices that hold the experts together.
    """
    shape, device = prepared.shape, choose_device(run.device)
    forward, backward, head = operations(run, prepared, experts_on)
    width, routed = getattr(torch, run.dtype).itemsize, shape.routed_width / experts_on
    moved = shape.outputs + shape.layers * (2 * shape.hidden + shape.attention + shape.inner + routed)
    there, back = (passes * width * moved / bandwidth for passes in PASSES)
    if experts_on > 1:
        message = 2 * (1 - 1 / experts_on) * shape.layers * shape.hidden * width / BYTES_PER_SECOND
        there, back = there + message, back + message
    back += there * bool(run.gradient_checkpointing)
    forward, backward = forward + there * flops, backward + back * flops  # as operations
    return CostModel(
        per_token=forward / flops,
        per_token_squared=shape.layers * 2 * shape.attention * ATTENTION_SLOWER / flops,
        fixed=shape.layers * LAYER_SECONDS[device.type],
        head_per_token=head / flops,
        backward_ratio=backward / forward,
        head_backward_ratio=1.0,
    )


def operations(run: Run, prepared: PreparedRun, experts_on: int = 1) -> tuple[float, float, float]:
    """Operations of a token in all layers, forward and backward, and in the output layer."""
    shape = prepared.shape
    lengths = [job.data.planned.lengths.astype(np.int64) for job in prepared.jobs]
    tokens = [int(own.sum()) for own in lengths]
    less = 1 - 1 / experts_on
    active = [job.active - less * job.active_on_experts for job in prepared.jobs]
    adapter = sum(t * own for t, own in zip(tokens, active, strict=True)) / sum(tokens)
    labels = sum(t * job.data.label_share for t, job in zip(tokens, prepared.jobs, strict=True)) / sum(tokens)
    frozen = shape.linear_parameters + shape.routed_parameters / experts_on
    forward = 2 * (frozen + adapter)
    backward = 2 * frozen + 4 * adapter + (forward if run.gradient_checkpointing else 0)
    head = 2.0 * shape.hidden * shape.vocabulary
    if prepared.head_in_layers is not None:  # of frozen layers, forward and backward
        whole = shape.linear_parameters + shape.routed_parameters
        head = prepared.head_in_layers * whole / shape.layers * (3 if run.gradient_checkpointing else 2)
    return forward, backward, head * labels


def memory_parts(run: Run, prepared: PreparedRun, tokens: int, kernels: bool | None = None) -> dict[str, int]:
    """Bytes by what holds them on the device, in a microbatch of so many tokens.

    Counted: frozen weights, of quantised ones the codes; per trainable parameter its value, the gradient of the global batch,
    two AdamW moments and the last good value, and a microbatch's gradient, whole in the first layer's backward, where that is
    more than what the other layers held; per token and layer what backward needs, also of adapters (with checkpointing one
    tensor per layer, and one layer's). On top comes the more of two moments: the loss (a chunk of logits, and two tensors like
    the hidden states, by kernels three), of which "logits" is what exceeds "buffers", and a layer's backward (gradients of its
    input and of two inner products, without kernels three; checkpointed, inputs of products; the two largest quantised weights
    as they are multiplied; with CUDA graphs the hidden states, their gradient and its copy, which are gone by then without).
    36 peaks of fit-h100.json and fit-h200.json are 0.983 to 1.006 of the sum. Not counted: what keep_outputs saves, the
    allocator's rounding, logits of models whose loss is not made in chunks, and about 0.6 GiB of a CPU process.

    Args:
        kernels: as of by_kernels; None: as on the run's device.
    """
    shape, width = prepared.shape, getattr(torch, run.dtype).itemsize
    kernels, device = by_kernels(run) if kernels is None else kernels, choose_device(run.device)
    own_attention = device.type == "cuda" and why_no_kernels(device) is not None
    others = (shape.layers - 1) * (per_layer := _bytes_per_layer(prepared, width, kernels, own_attention))
    kept = others + per_layer
    if run.gradient_checkpointing:
        layers = min(INPUTS_ON_DEVICE, shape.layers) if run.activation_offloading else shape.layers
        kept, others = layers * shape.hidden * width + per_layer, (layers - 1) * shape.hidden * width
    labels = max(job.data.label_share for job in prepared.jobs)
    temporary = 2 * shape.largest * width * (prepared.in_codes[0] > 0)
    inside = shape.hidden * (2 if run.gradient_checkpointing else 1) + (2 if kernels else 3) * shape.inner
    buffers = tokens * width * inside + temporary
    if kernels:
        loss = CHUNK_BYTES["cuda"] + 3 * round(tokens * max(1.0, labels)) * shape.hidden * width  # targets are rows
        graphs = run.cuda_graphs is True or (run.cuda_graphs == "auto" and run.parallel.ways in ([], ["tensor"]))
        if graphs and not own_attention:
            buffers += 3 * tokens * shape.hidden * width + RECORDING_BYTES
    else:
        loss = _chunk_bytes(rows := round(tokens * labels), shape.vocabulary, getattr(torch, run.dtype), device)
        loss += 2 * rows * shape.hidden * width
    if run.gradient_checkpointing:  # in the loss no layer is computed again
        loss -= tokens * per_layer
    more = max(0, loss - buffers)
    last = GRADIENT_BYTES * prepared.trainable - tokens * others - more
    return {
        "frozen weights": _frozen_bytes(run, prepared, width) + LIBRARY_BYTES * kernels,
        "adapters and optimizer": prepared.trainable * TRAINABLE_BYTES + max(0, last),
        "activations": tokens * kept,
        "logits": more,
        "buffers": buffers,
    }


def _bytes_per_layer(prepared: PreparedRun, width: int, kernels: bool, own_attention: bool) -> int:
    """Bytes of a token that a layer keeps for its backward. own_attention: it is torch's, beside kernels of the rest."""
    shape = prepared.shape
    if kernels:
        # inputs of two norms, whose outputs may be made again; queries, keys, values, attention output; gate and up
        found = 2 * width * (shape.hidden + shape.attention + shape.key_value + shape.inner)
        found += width * (shape.attention + shape.key_value) * shape.head_norms
        found += 0 if prepared.recompute else width * (2 * shape.hidden + shape.inner)
        if own_attention:  # which has keys and values of all heads, and the output twice
            found += width * (3 * shape.attention - 2 * shape.key_value)
    else:
        # inputs of two norms in float32, and their outputs; queries, keys and values of all heads as attention reads them, its
        # output twice; gate, up, activation and their product
        found = width * (2 * shape.hidden + 5 * shape.attention + 4 * shape.inner) + 2 * 4 * shape.hidden
        found += 4 * (shape.attention + shape.key_value) * shape.head_norms
    return found + width * shape.routed_width + width * _numbers_of_adapters(prepared) // shape.layers


def _chunk_bytes(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the logits of a chunk of so many rows with labels; those in 16 bits have a copy in float32."""
    budget, each = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]), dtype.itemsize + 4 * (dtype.itemsize < 4)
    return max(chunk_rows(rows, vocabulary, dtype, budget), default=0) * vocabulary * each


def _numbers_of_adapters(prepared: PreparedRun) -> int:
    """Numbers that a token keeps for its adapter, of linear layers S and the product for a magnitude's gradient, as for the job
    with the most, all layers together."""
    ranks, products = dict[str, int](), dict[str, int]()
    for job in prepared.jobs:
        products |= job.products
        for path, module in job.spec.modules.items():
            if module.kind == "linear":
                ranks[path] = max(ranks.get(path, 0), -(-module.rank // RANK_MULTIPLE) * RANK_MULTIPLE)
    return sum(ranks.values()) + sum(products.values())


def _frozen_bytes(run: Run, prepared: PreparedRun, width: int) -> int:
    """Bytes of all frozen weights on the device: floats, and codes of quantised layers."""
    shape, (numbers, codes) = prepared.shape, prepared.in_codes
    floats = shape.parameters - numbers - shape.vocabulary * shape.hidden * run.offload_embedding
    return floats * width + codes


def by_kernels(run: Run) -> bool:
    """Whether kernels compute norms and the loss; attention they compute unless why_no_kernels says a reason."""
    device = choose_device(run.device)
    return device.type == "cuda" and run.dtype in ("bfloat16", "float16") and runs_triton(device)
