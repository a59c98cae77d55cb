"""Adapters that begin with what is in the weights of the base, by PEFT's names for init_lora_weights.

    pissa    s B0 A0 = the first r terms of W's singular values; pissa_niter_n finds them by n iterations on a random subspace
    olora    B0, A0 = the first r columns and rows of W = Q R
    loftq    s B A = the first r terms of the singular values of W - what the codes of W stand for

PEFT takes s B0 A0 off the base weight for pissa and olora. The base is shared by all jobs here, so an adapter has twice the
rank, A = [A0; A0] and B = [B0, -B0], of which the second halves are never trained: W + s (B A - B0 A0) is what PEFT trains, and
the file is what PEFT makes of it with path_initial_model_for_weight_conversion. W is what the base computes with, codes or not.

Shapes: N outputs, K inputs, r rank before it is doubled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from packlora.adapters.attach import Adapter, adapted_layers
from packlora.adapters.kinds import PARAMETERS
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import AdapterWeights
from packlora.errors import InputError
from packlora.seeding import stable_hash


def check_starts(spec: AdapterSpec, skeleton: PreTrainedModel, job: str) -> None:
    """Raises InputError where a module has no such start."""
    for path in spec.of_weights:
        own = spec.modules[path]
        where = f"job {job!r}: init_lora_weights: {own.start} "
        if own.kind != "linear":
            keys = "target_parameters, or target_modules in its place," if own.kind in PARAMETERS else "target_modules"
            raise InputError(f"{where}is for linear layers, and {keys} matches {path}; leave one of them out")
        layer: torch.nn.Module = skeleton.get_submodule(path)
        if (rank := own.trained_rank) > (most := min(layer.weight.shape)):  # type: ignore[arg-type]
            raise InputError(
                f"{where}takes ranks up to the smaller side of a weight, {most} of {path}, and r is {rank}"
            )


@torch.no_grad()
def begin(
    model: PreTrainedModel, adapter: Adapter, seed: int, exact: Callable[[], Callable[[str], torch.Tensor]]
) -> None:
    """Write the first values of an attached adapter whose spec asks for such a start; none under loftq of layers without codes.

    Args:
        seed: of the job.
        exact: for loftq, what gives the weight [N, K] of a module before it was quantised.
    """
    layers, paths = adapted_layers(model), adapter.spec.of_weights
    before = exact() if any(adapter.spec.modules[path].start == "loftq" for path in paths) else None
    for path in paths:
        layer, own = layers[path, True], adapter.weights[path]
        assert isinstance(layer, AdaptedLinear) and isinstance(own, AdapterWeights)
        assert own.A is not None and own.B is not None
        frozen, start, scaling = layer.frozen(), str(own.spec.start), own.spec.scaling
        if start == "loftq" and frozen.dense() is not None:
            continue
        W_NK = frozen.rows(0, frozen.shape[0]).to(own.A.dtype)
        if start == "loftq":
            assert before is not None
            A_rK, B_Nr = _principal(before(path).to(W_NK) - W_NK, own.spec.rank, scaling)
        else:
            r = own.spec.trained_rank
            A_rK, B_Nr = _first(W_NK, start, r, scaling, stable_hash("start", seed, path))
            A_rK, B_Nr = torch.cat([A_rK, A_rK]), torch.cat([B_Nr, -B_Nr], 1)
        own.A.copy_(A_rK)
        own.B.copy_(B_Nr)
        if own.magnitude is not None:
            own.magnitude.copy_(own.norm())


def _first(W_NK: torch.Tensor, start: str, r: int, scaling: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A0 [r, K] and B0 [N, r], as PEFT's pissa_init and olora_init have them."""
    if start == "olora":
        Q, R = torch.linalg.qr(W_NK)
        return R[:r], Q[:, :r]
    if start == "pissa":
        return _principal(W_NK, r, scaling)
    with torch.random.fork_rng([W_NK.device] if W_NK.is_cuda else []):
        torch.manual_seed(seed)
        U, S, V = torch.svd_lowrank(W_NK, r, niter=int(start.rpartition("_")[2]))
    return _halves(U, S, V.T, scaling)


def _principal(W_NK: torch.Tensor, r: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, K] and B [N, r] whose scaled product is nearest to W."""
    U, S, Vh = torch.linalg.svd(W_NK, full_matrices=False)
    return _halves(U[:, :r], S[:r], Vh[:r], scaling)


def _halves(U: torch.Tensor, S: torch.Tensor, Vh: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    root = (S / scaling).sqrt()
    return root[:, None] * Vh, U * root
