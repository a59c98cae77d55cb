"""Rows of a weight on the host, by the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from packlora.base.host_embedding import HostEmbedding
from packlora.ops.host_rows.host_rows import host_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("V", "D"), [(7, 16), (300, 2049)])
def test_rows_are_those_of_an_embedding(V: int, D: int, dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(V, D, dtype=dtype)
    ids = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(0))
    want = embedding(ids)
    assert torch.equal(host_rows(embedding.weight.detach(), ids.flatten()).view(2, 5, D), want)
    assert torch.equal(HostEmbedding(embedding)(ids), want)
