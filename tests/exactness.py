"""Whether results are as exact as torch's own in the same dtype: by their errors against float64, over several draws."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Results = Mapping[str, torch.Tensor]
MORE = 4
"""Times as many draws again, at most, where a bound is missed."""
SENSIBLE = 0.05
"""Root mean square of torch's errors over that of the exact results, beyond which its result is none to be measured against:
bfloat16 rounds to 0.002."""


@dataclass
class _Errors:
    largest: float = 0.0
    squares: float = 0.0
    exact_squares: float = 0.0
    count: int = 0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        error = (got.double() - want.double()).nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf"))
        if error.numel():
            self.largest = max(self.largest, float(error.abs().max()))
            self.squares += float(error.square().sum())
            self.exact_squares += float(want.double().square().sum())
            self.count += error.numel()

    @property
    def rms(self) -> float:
        return (self.squares / max(self.count, 1)) ** 0.5


def assert_as_exact(
    draw: Callable[[int], tuple[Results, Results, Results]], draws: int, seed: object, name: Callable[[str], str] = str
) -> None:
    """For every result, over all draws: max|ours - ref64| <= 2 max|torch's - ref64| + 1e-6, and likewise root mean squares,
    where nothing is added.

    The root mean square hardly varies from seed to seed. The largest error does: it hangs on a few unlucky roundings in the
    few results of largest scale, and even two equally exact ways miss the bound in one of some hundred tries of a dozen draws.
    So where a bound is missed more is drawn, and no error is ever dropped: whoever is more than twice as inexact stays so.

    Torch's result must be one: an error of its own that is no rounding would let everything pass.

    Args:
        draw: from the number of a draw, results of ours, of torch in the same dtype, and in float64, by name.
        draws: drawn in any case.
        seed: named in the message.
        name: what results are pooled under, by their names.
    """
    ours: dict[str, _Errors] = defaultdict(_Errors)
    torchs: dict[str, _Errors] = defaultdict(_Errors)

    def missed() -> list[str]:
        found = []
        for key, a in ours.items():
            b = torchs[key]
            if not a.largest <= 2 * b.largest + 1e-6:
                found.append(f"{key}: {a.largest:.3g} against {b.largest:.3g}")
            if not a.rms <= 2 * b.rms + 1e-12:
                found.append(f"{key}, root mean square: {a.rms:.3g} against {b.rms:.3g}")
        return found

    for number in range((1 + MORE) * draws):
        if number >= draws and not missed():
            break
        got, plain, want = draw(number)
        assert got.keys() == plain.keys() == want.keys()
        for full, exact in want.items():
            ours[name(full)].add(got[full], exact)
            torchs[name(full)].add(plain[full], exact)
    for key, b in torchs.items():
        assert b.squares <= SENSIBLE**2 * b.exact_squares, f"{key}: torch's own result is wrong; seed {seed}"
    assert not missed(), f"{'; '.join(missed())} of torch; seed {seed}"


def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes buffers, as `torch.empty`, of which the new ones hold NaN: what a kernel does not write shows."""

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = empty(*args, **kwargs)
        if buffer.is_floating_point():
            buffer.data.fill_(math.nan)  # counts as no write
        return buffer

    return filled
