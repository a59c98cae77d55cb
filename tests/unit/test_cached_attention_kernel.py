"""The kernel of a decode pass in Triton's interpreter against the same pass by torch, with poisoned buffers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from cached_cases import PLACES, REAL, SLOTS, attended, drawn
from exactness import assert_as_exact, poisoned
from seeds import SEED

from packlora.base import kv_cache

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def by_kernel(operands: list[torch.Tensor], *how: Any) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "uses_kernels", lambda q, v: True)
        patch.setattr(torch, "empty", poisoned(torch.empty))
        return attended(operands, *how)


@pytest.mark.parametrize(
    ("H", "h", "D", "window", "cap", "sinks"),
    [(2, 2, 16, None, None, False), (6, 2, 24, None, None, True), (34, 2, 16, None, None, False), (3, 1, 16, 17, None, True),
     (2, 1, 160, 65, 2.0, False), (2, 2, 12, 1, None, False)],
)  # fmt: skip
def test_a_pass_is_as_exact_as_by_torch_and_keeps_the_same(
    H: int, h: int, D: int, window: int | None, cap: float | None, sinks: bool
) -> None:
    how = D**-0.5, window, cap, torch.linspace(-1, 4, H) if sinks else None

    def draw(seed: int) -> Any:
        wide = drawn(H, h, D, seed)
        narrow = [tensor.float() for tensor in wide]
        got, torchs, want = by_kernel(narrow, *how), attended(narrow, *how), attended(wide, *how)
        assert torch.equal(got["k"], torchs["k"]) and torch.equal(got["v"], torchs["v"])
        assert not got["y"][REAL:].any()
        return tuple({"y": one["y"][:REAL]} for one in (got, torchs, want))

    assert_as_exact(draw, draws=2, seed=SEED)


def test_a_row_sees_nothing_of_other_slots_nor_of_later_places() -> None:
    operands = [tensor.float() for tensor in drawn(4, 2, 16, 0)]
    want = by_kernel(operands, 0.25, None, None, None)["y"]
    q, k, v, *kept = (tensor.clone() for tensor in operands)
    for tensor in kept:
        for slot, place in enumerate(PLACES):
            tensor[slot, :, place:] = torch.nan
        tensor[4] = torch.nan
    got = by_kernel([q, k, v, *kept], 0.25, None, None, None)["y"]
    others = [row for row, slot in enumerate(SLOTS[:REAL]) if slot != 4]
    assert torch.equal(got[others], want[others]) and got[0].isnan().all()


@pytest.mark.parametrize(
    ("own", "others", "sink"), [(-80, 0, 0), (-95, 10, 0), (-200, 0, 0), (-100, -10, 4), (5, -9, 30)]
)
def test_scores_far_from_a_sink_are_weighed_as_by_torch(own: float, others: float, sink: float) -> None:
    """Scores of the token itself and of what is in the cache, and the sink's."""
    q, k, v, *kept = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in drawn(2, 2, 16, 0))
    q[..., 0], k[..., 0], kept[0][..., 0] = 1, own, others
    v[:], kept[1][:] = 1, 2
    how = 1.0, None, None, torch.full((2,), float(sink))
    got, want = (one([q, k, v, *kept], *how)["y"][:REAL] for one in (by_kernel, attended))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
