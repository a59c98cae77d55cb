"""A frozen weight that is no tensor, for tests of what must not need one."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class Bytes:
    """A weight [N, K] of eight bits a number with a scale per row, made dense a few rows at a time and never as a whole."""

    ROWS = 7
    change = None

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.asked: list[tuple[int, int]] = []
        """Rows that were read, (start, stop)."""
        self.key_is_known = True
        self._scales_N = weight_NK.abs().amax(1) / 127
        self.codes_NK = (weight_NK / self._scales_N[:, None]).round().to(torch.int8)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_NK.shape  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self._scales_N.dtype

    @property
    def device(self) -> torch.device:
        return self._scales_N.device

    @property
    def key(self) -> Hashable:
        return (id(self.codes_NK), self.codes_NK._version) if self.key_is_known else None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        self.asked.append((start, stop))
        return self.codes_NK[start:stop].to(self.dtype) * self._scales_N[start:stop, None]

    has_tensor = False

    def dense(self) -> None:
        return None

    tensor = dense

    def _starts(self) -> range:
        return range(0, self.shape[0], self.ROWS)

    def matmul(
        self, x_TK: torch.Tensor, bias_N: torch.Tensor | None = None, accumulate: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        y_TN = torch.zeros(len(x_TK), self.shape[0], dtype=x_TK.dtype) if accumulate is None else accumulate
        for start in self._starts():
            y_TN[:, start : start + self.ROWS] += (scale * x_TK @ self.rows(start, start + self.ROWS).T).to(y_TN.dtype)
        return (y_TN if bias_N is None else y_TN.add_(bias_N)).to(x_TK.dtype)

    def matmul_t(self, d_TN: torch.Tensor, accumulate: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        dx_TK = torch.zeros(len(d_TN), self.shape[1], dtype=d_TN.dtype) if accumulate is None else accumulate
        for start in self._starts():
            dx_TK += scale * d_TN[:, start : start + self.ROWS] @ self.rows(start, start + self.ROWS)
        return dx_TK
