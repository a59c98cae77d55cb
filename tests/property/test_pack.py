"""Packing and sample order for any lengths and any settings: what must hold for every job, whatever shares the run."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from packlora.config import TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.errors import InputError
from packlora.schedule.pack import Microbatch, lower_bound, pack_round

settings.register_profile("packlora", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.load_profile("packlora")

Batches = dict[str, list[tuple[int, int]]]
METHODS = st.sampled_from(["greedy", "solo"])


@st.composite
def rounds(draw: st.DrawFn, most: int = 12) -> tuple[Batches, int]:
    """Global batches of up to four jobs, with sample numbers in no order, and a capacity that holds every sample."""
    capacity = draw(st.integers(1, 60))
    batches = {}
    for name in draw(st.lists(st.sampled_from(["b", "a", "d", "c"]), unique=True, max_size=4)):
        lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=most))
        numbers = draw(st.permutations(range(len(lengths))))
        batches[name] = list(zip(numbers, lengths, strict=True))
    return batches, capacity


def flat(plan: list[Microbatch]) -> list[tuple[str, int, int]]:
    return [(item.job, item.sample, item.length) for microbatch in plan for item in microbatch.samples]


# --- packing -----------------------------------------------------------------------------------------------------------


@given(rounds(), METHODS)
def test_every_sample_is_packed_exactly_once_and_no_microbatch_is_over_capacity_or_empty(
    case: tuple[Batches, int], method: str
) -> None:
    batches, capacity = case
    plan = pack_round(batches, capacity, method)
    wanted = Counter((job, number, length) for job, batch in batches.items() for number, length in batch)
    assert Counter(flat(plan)) == wanted
    for microbatch in plan:
        assert 0 < microbatch.num_tokens <= capacity
        assert microbatch.num_tokens == sum(length for _, _, length in flat([microbatch]))


@given(rounds(), METHODS)
def test_within_a_microbatch_jobs_are_contiguous_and_samples_keep_the_order_of_the_global_batch(
    case: tuple[Batches, int], method: str
) -> None:
    batches, capacity = case
    place = {
        (job, number): (rank, at) for rank, job in enumerate(batches) for at, (number, _) in enumerate(batches[job])
    }
    for microbatch in pack_round(batches, capacity, method):
        places = [place[item.job, item.sample] for item in microbatch.samples]
        assert places == sorted(places)


@given(rounds(), METHODS)
def test_every_job_completes_exactly_once_and_in_its_last_microbatch(case: tuple[Batches, int], method: str) -> None:
    batches, capacity = case
    plan = pack_round(batches, capacity, method)
    assert Counter(itertools.chain.from_iterable(mb.completes for mb in plan)) == Counter(dict.fromkeys(batches, 1))
    seen: Counter[str] = Counter()
    for microbatch in plan:
        seen.update(item.job for item in microbatch.samples)
        for job in batches:
            holds = any(item.job == job for item in microbatch.samples)
            assert (job in microbatch.completes) == (holds and seen[job] == len(batches[job]))


@given(rounds())
def test_solo_never_mixes_jobs(case: tuple[Batches, int]) -> None:
    batches, capacity = case
    for microbatch in pack_round(batches, capacity, "solo"):
        assert len({item.job for item in microbatch.samples}) == 1


@given(rounds(), METHODS)
def test_packing_the_same_round_again_gives_the_same_plan(case: tuple[Batches, int], method: str) -> None:
    batches, capacity = case
    again = {job: list(batch) for job, batch in batches.items()}
    assert pack_round(batches, capacity, method) == pack_round(again, capacity, method)


@given(rounds())
def test_solo_packs_a_job_as_if_it_were_the_only_one(case: tuple[Batches, int]) -> None:
    batches, capacity = case
    apart = [mb for job, batch in batches.items() for mb in pack_round({job: batch}, capacity, "greedy")]
    assert pack_round(batches, capacity, "solo") == apart


@given(rounds())
def test_the_number_of_microbatches_is_at_least_the_lower_bound_and_no_two_could_be_joined(
    case: tuple[Batches, int],
) -> None:
    batches, capacity = case
    plan = pack_round(batches, capacity)
    assert len(plan) >= lower_bound([length for _, _, length in flat(plan)], capacity)
    for one, other in itertools.combinations(plan, 2):
        assert one.num_tokens + other.num_tokens > capacity


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """The optimum, by trying every assignment."""
    best = len(lengths)

    def place(index: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if index == len(lengths):
            best = len(bins)
            return
        for number, used in enumerate(bins):
            if used + lengths[index] <= capacity:
                place(index + 1, [*bins[:number], used + lengths[index], *bins[number + 1 :]])
        place(index + 1, [*bins, lengths[index]])

    place(0, [])
    return best


@settings(max_examples=300)
@given(st.data())
def test_greedy_needs_at_most_eleven_ninths_of_the_fewest_microbatches_plus_one(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 100))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=7))
    fewest = fewest_bins(lengths, capacity)
    assert lower_bound(lengths, capacity) <= fewest
    assert fewest <= len(pack_round({"a": list(enumerate(lengths))}, capacity)) <= 11 / 9 * fewest + 1


def test_greedy_puts_a_sample_where_it_fits_best() -> None:
    plan = pack_round({"a": [(0, 2), (1, 6), (2, 3), (3, 7), (4, 2)]}, 10)  # the 3 beside the 6 would need a third
    assert sorted(sorted(item.length for item in microbatch.samples) for microbatch in plan) == [[2, 2, 6], [3, 7]]


@given(rounds(), METHODS, st.integers(1, 5))
def test_a_sample_over_the_capacity_is_refused_not_split(case: tuple[Batches, int], method: str, over: int) -> None:
    batches, capacity = case
    assume(batches)
    next(iter(batches.values())).append((99, capacity + over))
    with pytest.raises(
        ValueError, match=f"a sample of {capacity + over} tokens does not fit a microbatch of {capacity}"
    ):
        pack_round(batches, capacity, method)


def test_a_hundred_thousand_samples_are_packed_near_the_lower_bound() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 100_000).tolist()
    plan = pack_round({"a": list(enumerate(lengths))}, 4096)
    assert len(plan) <= 1.001 * lower_bound(lengths, 4096) + 1


# --- sample order ------------------------------------------------------------------------------------------------------


def job_data(number: int, name: str = "a", seed: int = 0, limit: int | None = None, **config: object) -> JobData:
    sample = Sample(np.arange(3, dtype=np.int32), np.array([False, True, True]))
    return JobData(name, [sample] * number, TrainConfig.model_validate(config), seed, limit)


def epoch_of(data: JobData, epoch: int) -> list[int]:
    steps = range(epoch * data.batches_per_epoch, (epoch + 1) * data.batches_per_epoch)
    return [number for step in steps for number in data.global_batch(step)]


SIZES = (st.integers(1, 40), st.integers(1, 12), st.booleans())


@given(*SIZES, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_an_epoch_holds_every_sample_exactly_once_in_full_global_batches_but_the_last(
    number: int, size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    data = job_data(number, seed=seed, global_batch_size=size, shuffle=shuffle)
    assert sorted(epoch_of(data, epoch)) == list(range(number))
    first = epoch * data.batches_per_epoch
    sizes = [len(data.global_batch(first + batch)) for batch in range(data.batches_per_epoch)]
    assert sizes == [size] * (number // size) + [number % size] * (number % size > 0)
    if not shuffle:
        assert epoch_of(data, epoch) == list(range(number))


@given(*SIZES, st.integers(0, 5))
def test_with_drop_last_all_global_batches_are_full_and_only_the_rest_of_an_epoch_is_left_out(
    number: int, size: int, shuffle: bool, epoch: int
) -> None:
    assume(number >= size)
    data = job_data(number, global_batch_size=size, shuffle=shuffle, drop_last=True)
    whole = epoch_of(job_data(number, global_batch_size=size, shuffle=shuffle), epoch)
    assert epoch_of(data, epoch) == whole[: number - number % size]
    first = epoch * data.batches_per_epoch
    assert all(len(data.global_batch(first + batch)) == size for batch in range(data.batches_per_epoch))


@given(st.integers(1, 11))
def test_with_drop_last_too_few_samples_for_one_global_batch_are_refused(number: int) -> None:
    with pytest.raises(InputError, match=f"job 'a': {number} samples do not fill one global batch of 12"):
        job_data(number, global_batch_size=12, drop_last=True)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 12))
def test_the_order_is_the_same_whatever_was_asked_before_and_however_batches_are_cut(
    steps: list[int], size: int
) -> None:
    one = job_data(12, seed=5, global_batch_size=size)
    asked = [one.global_batch(step) for step in steps]
    for step, batch in zip(steps, asked, strict=True):
        assert batch == job_data(12, seed=5, global_batch_size=size).global_batch(step)
    singles = job_data(12, seed=5, global_batch_size=1, learning_rate=0.5)
    assert epoch_of(one, 2) == epoch_of(singles, 2)


def test_the_order_depends_on_seed_name_and_epoch() -> None:
    orders = [
        tuple(epoch_of(job_data(30, name=name, seed=seed), epoch))
        for name, seed, epoch in itertools.product(("a", "b", "a1"), (0, 1, 11), (0, 1, 11))
    ]
    assert len(set(orders)) == len(orders)


@given(
    st.integers(1, 40), st.integers(1, 12), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 30)),
    st.one_of(st.just(-1), st.integers(1, 30)),
)  # fmt: skip
def test_the_number_of_steps_follows_the_epochs_unless_max_steps_and_never_exceeds_the_limit(
    number: int, size: int, eighths: int, limit: int | None, max_steps: int
) -> None:
    data = job_data(number, limit=limit, global_batch_size=size, num_train_epochs=eighths / 8, max_steps=max_steps)
    per_epoch = len(range(0, number, size))
    steps = -(-eighths * per_epoch // 8) if max_steps == -1 else max_steps  # eighths are exact in binary
    assert data.num_steps == min(steps, limit or steps)
    assert math.ceil(number / size) == data.batches_per_epoch
    assert all(data.global_batch(step) for step in range(data.num_steps))
