"""A microbatch's tensors, and the sums of its losses: what they hold, and that the host waits for no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packed import PackedSample, parts
from torch.utils._python_dispatch import TorchDispatchMode

from packlora.data.encode import Sample
from packlora.engine.collate import IGNORE, collate
from packlora.engine.heads import judge

CPU, META = torch.device("cpu"), torch.device("meta")
MIXES: dict[str, list[tuple[int, int, int | None]]] = {
    "several": [(0, 9, 2**64 - 1), (0, 4, 2**64 - 1), (2, 23, None), (3, 1, 8), (3, 6, 8)],
    "one": [(1, 40, None)],
    "tiny": [(0, 3, None), (2, 2, 5)],
}
"""Owner, tokens and dropout key of each sample; one of a single token has no label."""
WEIGHTS = np.array([0.1, 1 / 3, 7.0, 1e-9])


def samples(mix: str) -> list[PackedSample]:
    generator = np.random.default_rng(0)
    packed = []
    for number, (owner, length, key) in enumerate(MIXES[mix]):
        is_label = generator.random(length) < 0.6
        is_label[0] = False
        sample = Sample(generator.integers(0, 99, length).astype(np.int32), is_label)
        packed.append(PackedSample(owner, sample, number, 3, key))
    return packed


def words(job_key: int, step: int, sample: int, position: int) -> tuple[int, int]:
    """A token's dropout key in whole numbers: three rounds of SplitMix64."""
    word, gamma = job_key, 0x9E3779B97F4A7C15
    for number in (step, sample, position):
        word = (word + gamma * (number + 1)) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        word ^= word >> 31
    low, high = (part - 2**32 * (part >= 2**31) for part in (word % 2**32, word >> 32))
    return low, high


class Operations(TorchDispatchMode):
    """The names of what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mix", MIXES)
def test_every_token_and_label_has_what_belongs_to_it(mix: str) -> None:
    """Token by token, from the samples."""
    items = samples(mix)
    batch = collate(parts(items, WEIGHTS), CPU)
    tokens, labels = [], []
    for item in items:
        for at, token in enumerate(item.sample.ids.tolist()):
            if item.sample.is_label[at]:
                labels.append((len(tokens) - 1, token, WEIGHTS[item.owner]))
            key = (0, 0) if item.dropout_key is None else words(item.dropout_key, 3, item.number, at)
            tokens.append((token, at, key))
    keys_T2 = batch.owners.keys_T2
    found_keys = [(0, 0)] * batch.owners.total if keys_T2 is None else [(int(a), int(b)) for a, b in keys_T2]
    found = list(zip(batch.input_ids_T.tolist(), batch.position_ids_T.tolist(), found_keys, strict=True))
    assert found[: len(tokens)] == tokens
    first = items[0].sample.ids.tolist()  # nobody's tokens are its own once more
    assert found[len(tokens) :] == [(first[at % len(first)], at, (0, 0)) for at in range(len(found) - len(tokens))]
    assert batch.weights_L.dtype == torch.float64
    rows = list(zip(batch.rows_L.tolist(), batch.labels_L.tolist(), batch.weights_L.tolist(), strict=True))
    assert rows[: len(labels)] == labels
    assert all(label == IGNORE for _, label, _ in rows[len(labels) :])
    assert sum(part.num_rows for part in batch.parts) == len(rows) >= 16


@pytest.mark.parametrize("mix", MIXES)
def test_tensors_begin_at_128_bytes_as_kernels_take_them(mix: str) -> None:
    batch = collate(parts(samples(mix), WEIGHTS), CPU)
    tensors = [batch.input_ids_T, batch.position_ids_T, batch.rows_L, batch.labels_L, batch.weights_L]
    tensors += [batch.owners.keys_T2] if batch.owners.keys_T2 is not None else []
    start = batch.input_ids_T.data_ptr()
    for tensor in tensors:
        assert tensor is not None
        assert tensor.is_contiguous()
        assert (tensor.data_ptr() - start) % 128 == 0


@pytest.mark.parametrize("mix", MIXES)
def test_a_microbatch_is_sent_by_one_copy(mix: str) -> None:
    with Operations() as seen:
        collate(parts(samples(mix), WEIGHTS), META)
    assert seen.names.count("_to_copy") == 1
    assert set(seen.names) <= {"empty.memory_format", "_to_copy", "slice.Tensor", "view", "view.dtype", "detach"}


@pytest.mark.parametrize("mix", MIXES)
def test_losses_are_summed_by_owner_without_a_look_at_them(mix: str) -> None:
    """On the meta device, whatever depends on values raises."""
    items = samples(mix)
    batch = collate(parts(items), CPU)
    losses_L = torch.randn(len(batch.labels_L)).masked_fill(batch.labels_L == IGNORE, 0)
    got = judge(losses_L, batch).sums
    first, want = 0, dict[int, torch.Tensor]()
    for owner in sorted({item.owner for item in items}):
        count = sum(int(item.sample.is_label.sum()) for item in items if item.owner == owner)
        want[owner] = losses_L[first : first + count].double().sum()
        first += count
    torch.testing.assert_close({owner: own[0] for owner, own in got.items()}, want, rtol=1e-14, atol=1e-14)
    assert judge(losses_L.to(META), collate(parts(items), META)).sums.keys() == want.keys()


def test_a_job_s_sum_has_the_same_bits_beside_others() -> None:
    items = samples("several")
    batch = collate(parts(items), CPU)
    losses_L = torch.randn(len(batch.labels_L)).masked_fill(batch.labels_L == IGNORE, 0)
    together, first = judge(losses_L, batch).sums, 0
    for owner in (0, 2, 3):
        own = [item for item in items if item.owner == owner]
        count = sum(int(item.sample.is_label.sum()) for item in own)
        alone = torch.zeros(max(16, count))
        alone[:count] = losses_L[first : first + count]
        assert torch.equal(judge(alone, collate(parts(own), CPU)).sums[owner], together[owner])
        first += count


@pytest.mark.parametrize("mix", MIXES)
def test_rows_of_labels_have_the_owners_and_keys_of_their_tokens_and_padding_is_nobody_s(mix: str) -> None:
    items = samples(mix)
    batch = collate(parts(items, WEIGHTS), CPU)
    owners, rows = batch.owners, batch.owners.rows
    assert rows is not None and rows.total == len(batch.labels_L)
    own = [item.owner for item in items for _ in range(item.sample.num_labels)]
    found = {at: number for number, start, stop in rows.segments for at in range(start, stop)}
    assert [found.get(at) for at in range(rows.total)] == own + [None] * (rows.total - len(own))
    if owners.keys_T2 is not None:
        assert rows.keys_T2 is not None and torch.equal(rows.keys_T2, owners.keys_T2[batch.rows_L])
    middle = rows.part(1, rows.total - 2)
    assert {at + 1: n for n, start, stop in middle.segments for at in range(start, stop)} == {
        at: number for at, number in found.items() if 1 <= at < rows.total - 2
    }
