"""Tokens drawn from logits, and their log-probabilities.

Each row is drawn by one number of its sample's own generator and by its own logits, through the inverse of the distribution
function. So other rows change nothing.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from packlora.base.kv_cache import in_any_order
from packlora.engine.sampling import Likeliest, PromptScores, SampleRequest
from packlora.ops.wide import wide_dtype

ROWS = 64
"""Rows whose probabilities are in memory at once."""
BLOCK = 512
"""Tokens whose probabilities are added up together on a GPU."""


class Drawn(NamedTuple):
    """ids; logprobs: NaN where logits are not finite. top, entropies: where requested. All by row."""

    ids: list[int]
    logprobs: list[float]
    top: list[Likeliest | None]
    entropies: list[float | None]


@torch.no_grad()
def draw(logits_RV: torch.Tensor, requests: Sequence[SampleRequest], uniforms: Sequence[float]) -> Drawn:
    """Draw one token of each row. It waits for the device once, at its end, unless the likeliest tokens are requested.

    Args:
        requests: that each row is of.
        uniforms: of each row's own generator, from [0, 1); that of a row with temperature 0 is not used.
    """
    asks = any(request.entropy for request in requests)
    found = logits_RV.new_empty(2 + asks, len(requests), dtype=wide_dtype(logits_RV.device))
    tops = list[Likeliest | None]()
    for at in range(0, len(requests), ROWS):
        here, own = slice(at, at + ROWS), requests[at : at + ROWS]
        logp = logprobs_of(logits_RV[here], [request.temperature or 1.0 for request in own])
        found[0, here], found[1, here] = _drawn(logp, own, uniforms[here])
        tops += _tops(logp, own)
        if asks:
            found[2, here] = _entropies(logp)
    ids, logprobs, *told = found.cpu().numpy()
    entropies = [float(told[0][row]) if request.entropy else None for row, request in enumerate(requests)]
    return Drawn(ids.astype(np.int64).tolist(), logprobs.tolist(), tops, entropies)


def _sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values on the device. The host does not wait for the pass that the device runs."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _drawn(
    logp_RV: torch.Tensor, requests: Sequence[SampleRequest], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities; a row of logits that are not finite is NaN all over."""
    rows = [row for row, request in enumerate(requests) if request.temperature > 0]
    if not rows:
        logprobs_R, ids_R = logp_RV.max(-1)
        return ids_R, logprobs_R
    u_N = _sent([uniforms[row] for row in rows], wide_dtype(logp_RV.device), logp_RV.device)
    if len(rows) == len(requests):
        ids_R = _inverse(_filtered(logp_RV, requests), u_N)
    else:
        ids_R, rows_N = logp_RV.argmax(-1), _sent(rows, torch.int64, logp_RV.device)
        ids_R[rows_N] = _inverse(_filtered(logp_RV[rows_N], [requests[row] for row in rows]), u_N)
    return ids_R, logp_RV.gather(-1, ids_R[:, None])[:, 0]


def _entropies(logp_RV: torch.Tensor) -> torch.Tensor:
    """Entropies [R]; a token of probability 0 adds nothing."""
    finite_RV = logp_RV.clamp(min=torch.finfo(logp_RV.dtype).min)
    return -logp_RV.exp().mul_(finite_RV).sum(-1)


def _tops(logp_RV: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Likeliest | None]:
    """The likeliest tokens of rows for which they are requested."""
    most = max(request.top_sampled for request in requests)
    if not most:
        return [None] * len(requests)
    top = likeliest(logp_RV, most)
    return [
        Likeliest(top.ids[row : row + 1, :k], top.logprobs[row : row + 1, :k]) if (k := one.top_sampled) else None
        for row, one in enumerate(requests)
    ]


def logprobs_of(logits_RV: torch.Tensor, temperatures: Sequence[float] = ()) -> torch.Tensor:
    """Log-probabilities [R, V] in float32, or float64 of float64 logits. temperatures: by row; none: 1."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    if any(temperature != 1 for temperature in temperatures):
        logits_RV = logits_RV / _sent(temperatures, wide, logits_RV.device)[:, None]
    return torch.log_softmax(logits_RV, -1, dtype=wide)


def _filtered(logp_RV: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """The log-probabilities with -inf for tokens that top_k or top_p leave out."""
    V, device, wide = logp_RV.shape[1], logp_RV.device, wide_dtype(logp_RV.device)
    limited: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if 0 < request.top_k < V or request.top_p < 1:
            limited.setdefault(request.top_k if 0 < request.top_k < V else V, []).append(row)
    logp_RV = logp_RV.clone() if limited else logp_RV
    for k, rows in limited.items():
        rows_N = _sent(rows, torch.int64, device)
        p_N = _sent([requests[row].top_p for row in rows], wide, device)
        best_Nk, order_Nk = logp_RV[rows_N].topk(k)
        probs_Nk = torch.softmax(best_Nk, -1, dtype=wide)
        left_out_Nk = probs_Nk.cumsum(-1).sub_(probs_Nk) >= p_N[:, None]
        kept_NV = logp_RV.new_full((len(rows), V), float("-inf"))
        with in_any_order():
            logp_RV[rows_N] = kept_NV.scatter_(1, order_Nk, best_Nk.masked_fill_(left_out_Nk, float("-inf")))
    return logp_RV


def _inverse(logp_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The tokens at which the distribution functions pass u times their totals."""
    if logp_RV.is_cuda:
        return inverse_in_blocks(logp_RV, u_R)
    sums_RV = logp_RV.exp().cumsum(-1, dtype=u_R.dtype)
    return _passed(sums_RV, u_R * sums_RV[:, -1])


def inverse_in_blocks(logp_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The same by sums of blocks first: a running sum over a whole vocabulary goes through it one thread block a row. Rows of
    NaN give any token."""
    R, V = logp_RV.shape
    p_RNB = logp_RV.new_empty(R, -(-V // BLOCK), BLOCK)
    p_RP = p_RNB.view(R, -1)
    torch.exp(logp_RV, out=p_RP[:, :V])
    p_RP[:, V:] = 0
    sums_RN = p_RNB.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted_R = u_R * sums_RN[:, -1]
    block_R = _passed(sums_RN, wanted_R)
    own_RB = p_RNB.gather(1, block_R[:, None, None].expand(-1, 1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    before_R = F.pad(sums_RN, (1, 0)).gather(-1, block_R[:, None])[:, 0]
    return (block_R * BLOCK + _passed(own_RB, wanted_R - before_R)).clamp_(max=V - 1)


def _passed(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The first place of each row of rising sums that is above what is wanted; where rounding leaves none, the first that has
    the last sum, so that nothing of probability 0 is found."""
    below_the_last = sums[:, -1] * (1 - torch.finfo(sums.dtype).eps / 2)  # the next smaller number
    wanted = torch.minimum(wanted, below_the_last)[:, None]
    return torch.searchsorted(sums, wanted, right=True)[:, 0].clamp_(max=sums.shape[1] - 1)


def likeliest(logp_RV: torch.Tensor, k: int) -> Likeliest:
    """The k likeliest tokens of each row, or all where there are fewer."""
    values, ids = logp_RV.topk(min(k, logp_RV.shape[1]), -1)
    return Likeliest(ids.cpu().numpy().astype(np.int32), values.float().cpu().numpy())


@torch.no_grad()
def prompt_scores(logits_PV: torch.Tensor, request: SampleRequest) -> PromptScores:
    """Scores of a prompt. logits_PV: at all its tokens but the last, which predict those from the second on."""
    pieces: list[tuple[torch.Tensor, Likeliest | None, torch.Tensor | None]] = []
    following = torch.tensor(request.prompt[1:], dtype=torch.int64, device=logits_PV.device)
    named = request.prompt_targets
    for at in range(0, len(following), ROWS):
        logp = logprobs_of(logits_PV[at : at + ROWS])
        own = logp.gather(-1, following[at : at + ROWS, None])[:, 0]
        found = None
        if named is not None:
            ids = torch.from_numpy(named[at : at + ROWS]).to(logp.device)
            found = torch.where(ids >= 0, logp.gather(-1, ids.clamp(min=0)), float("nan"))
        pieces.append((own, likeliest(logp, request.top_prompt) if request.top_prompt else None, found))
    first = np.full(1, np.nan, np.float32)
    own_logprobs = [first, *(own.float().cpu().numpy() for own, _, _ in pieces)]
    tops = [top for _, top, _ in pieces if top is not None]
    targets = [found.float().cpu().numpy() for _, _, found in pieces if found is not None]
    k = request.top_prompt
    top = Likeliest(
        np.concatenate([np.zeros((0, k), np.int32), *(one.ids for one in tops)])
        if tops
        else np.zeros((0, k), np.int32),
        np.concatenate([one.logprobs for one in tops]) if tops else np.zeros((0, k), np.float32),
    )
    return PromptScores(
        np.concatenate(own_logprobs) if request.prompt_logprobs else None,
        top if request.top_prompt else None,
        None if named is None else np.concatenate(targets) if targets else np.zeros(named.shape, np.float32),
    )
