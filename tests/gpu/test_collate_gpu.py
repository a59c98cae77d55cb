"""A microbatch goes to a GPU, and its losses are summed, while the host goes on.

make gpu
"""

from __future__ import annotations

import numpy as np
import torch
from packed import PackedSample, parts
from waits import no_waiting

from packlora.data.encode import Sample
from packlora.engine.collate import collate
from packlora.engine.heads import judge


def test_nothing_waits_for_the_device_and_the_tensors_are_those_of_a_cpu() -> None:
    ids = np.arange(100, dtype=np.int32)
    samples = [
        PackedSample(owner, Sample(ids[:length], ids[:length] % 3 > 0), number, 2, 7 if owner else None)
        for number, (owner, length) in enumerate([(0, 9), (0, 4), (2, 23), (3, 1), (3, 60)])
    ]
    weights = np.array([0.1, 1 / 3, 7.0, 1e-9])
    want = collate(parts(samples, weights), torch.device("cpu"))
    losses_L = torch.rand(len(want.labels_L), device="cuda")
    with no_waiting():
        got = collate(parts(samples, weights), torch.device("cuda"))
        sums = judge(losses_L, got).sums
    for name in ("input_ids_T", "position_ids_T", "rows_L", "labels_L", "weights_L"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    on_host = {owner: own.cpu() for owner, own in sums.items()}
    torch.testing.assert_close(on_host, judge(losses_L.cpu(), want).sums, rtol=1e-14, atol=0)
