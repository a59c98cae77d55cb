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

from packlora.engine.sampling import Likeliest, PromptScores, SampleRequest

ROWS = 64
"""Rows whose probabilities are in memory at once."""
BLOCK = 512
"""Tokens whose probabilities are added up together on a GPU."""


class Drawn(NamedTuple):
    """ids: int64 [R]. logprobs: float64 [R], NaN where logits are not finite. top: by row, where requested."""

    ids: np.ndarray
    logprobs: np.ndarray
    top: list[Likeliest | None]


@torch.no_grad()
def draw(logits_RV: torch.Tensor, requests: Sequence[SampleRequest], uniforms: Sequence[float]) -> Drawn:
    """Draw one token of each row.

    Args:
        requests: that each row is of.
        uniforms: of each row's own generator, from [0, 1).
    """
    asked = np.array([[request.temperature or 1.0 for request in requests], uniforms])
    heat_R, u_R = torch.from_numpy(asked).to(logits_RV.device)
    parts = list[torch.Tensor]()
    tops = list[Likeliest | None]()
    for at in range(0, len(requests), ROWS):
        here, own = slice(at, at + ROWS), requests[at : at + ROWS]
        logp = logprobs_of(logits_RV[here], heat_R[here])
        parts.append(_drawn(logp, own, u_R[here]))
        tops += _tops(logp, own)
    ids, logprobs = torch.cat(parts, 1).cpu().numpy()
    return Drawn(ids.astype(np.int64), logprobs, tops)


def _drawn(logp_RV: torch.Tensor, requests: Sequence[SampleRequest], u_R: torch.Tensor) -> torch.Tensor:
    """Tokens and their log-probabilities, float64 [2, R]."""
    ids_R = logp_RV.argmax(-1)
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if len(drawn) == len(requests):
        ids_R = _inverse(_filtered(logp_RV, requests), u_R)
    elif drawn:
        rows = torch.tensor(drawn, device=logp_RV.device)
        ids_R[rows] = _inverse(_filtered(logp_RV[rows], [requests[row] for row in drawn]), u_R[rows])
    logprobs = logp_RV.gather(-1, ids_R[:, None])[:, 0]
    finite = logp_RV.amax(-1).isfinite()  # a row with a NaN is NaN all over; infinite logits give NaN
    return torch.stack([ids_R.double(), torch.where(finite, logprobs.double(), float("nan"))])


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


def logprobs_of(logits_RV: torch.Tensor, temperatures_R: torch.Tensor | None = None) -> torch.Tensor:
    """Log-probabilities [R, V] in float32, or float64 of float64 logits."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    logits = logits_RV.to(wide)
    if temperatures_R is not None:
        logits = logits / temperatures_R.to(wide)[:, None]
    return torch.log_softmax(logits, -1)


def _filtered(logp_RV: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """The log-probabilities with -inf for tokens that top_k or top_p leave out."""
    V = logp_RV.shape[1]
    limited = [row for row, request in enumerate(requests) if 0 < request.top_k < V or request.top_p < 1]
    logp_RV = logp_RV.clone() if limited else logp_RV
    for row in limited:
        request = requests[row]
        whole = not 0 < request.top_k < V
        best, order = logp_RV[row].topk(V if whole else request.top_k)
        probs = torch.softmax(best.double(), -1)
        kept = probs.cumsum(-1) - probs < request.top_p
        kept[0] = True
        logp_RV[row] = logp_RV.new_full((V,), float("-inf")).scatter(0, order[kept], best[kept])
    return logp_RV


def _inverse(logp_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The tokens at which the distribution functions pass u times their totals."""
    if logp_RV.is_cuda:
        return inverse_in_blocks(logp_RV, u_R)
    sums_RV = logp_RV.exp().cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(sums_RV, (u_R * sums_RV[:, -1])[:, None], right=True)[:, 0]
    return found.clamp_(max=logp_RV.shape[1] - 1)


def inverse_in_blocks(logp_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The same by sums of blocks first: a running sum over a whole vocabulary goes through it one thread block a row."""
    p_RNB = F.pad(logp_RV.exp(), (0, -logp_RV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums_RN = p_RNB.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted_R = u_R * sums_RN[:, -1]
    block_R = _passed(sums_RN, wanted_R)
    own_RB = p_RNB[torch.arange(len(u_R), device=u_R.device), block_R].cumsum(-1, dtype=torch.float64)
    before_R = F.pad(sums_RN, (1, 0)).gather(-1, block_R[:, None])[:, 0]
    return block_R * BLOCK + _passed(own_RB, wanted_R - before_R)


def _passed(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The first place of each row of rising sums that is above what is wanted; where rounding leaves none, the first that has
    the last sum, so that nothing of probability 0 is found."""
    above = torch.searchsorted(sums, wanted[:, None], right=True)
    return torch.minimum(above, torch.searchsorted(sums, sums[:, -1:].contiguous()))[:, 0]


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
