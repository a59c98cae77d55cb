"""The kernels' sizes on a device: few candidates that fit it, each as exact as the usual one, measured in the time there is,
remembered for this device alone."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from group_cases import KINDS, GroupCase, cast, group_is_as_exact, make_case, run_group
from seeds import SEED, SOAK

from packlora.ops import gpu
from packlora.ops.lora_linear.kernels import config, sizes
from packlora.ops.lora_linear.kernels.config import BITS_16, FLOAT_32, LARGE_16, Sizes, sizes_for, use, usual
from packlora.ops.lora_linear.plan import ROUTED, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.plans import identity, kernel_sizes
from packlora.plans.cache import PlanCache
from packlora.plans.kernel_sizes import KernelCache, Record, combined, described
from packlora.report.screen import Screen
from packlora.tune import kernel_sizes as kernel_tuning
from packlora.tune import kernels
from packlora.tune.candidates import KERNELS
from packlora.tune.kernel_sizes import SHAPES, Shape, Step, step_maker, tune_kernels
from packlora.tune.timing import Timing, Timings

CPU = torch.device("cpu")
EPILOGUE = Plan("mm", "epilogue", "one-pass", "routed")
MOST = max(map(len, KERNELS.values()))


# --- candidates --------------------------------------------------------------------------------------------------------


def test_each_kernel_has_few_candidates_and_fields_of_its_own() -> None:
    known = [name for candidates in KERNELS.values() for name in candidates[0]]
    assert len(known) == len(set(known)), "what is best for one must not change another"
    for candidates in KERNELS.values():
        assert 3 <= len(candidates) <= 12
        assert len({described(fields) for fields in candidates}) == len(candidates)
        for fields in candidates:
            assert set(fields) == set(candidates[0])
            combined({"any": fields})
            assert any(getattr(BITS_16, name) != value for name, value in fields.items()), (
                "the usual sizes come unasked"
            )


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), LARGE_16), ((8, 0), BITS_16), ((12, 0), BITS_16)])
def test_larger_blocks_are_for_devices_with_the_memory_for_them(
    capability: tuple[int, int], expected: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    assert usual(CPU) is expected and sizes_for(torch.bfloat16, CPU) is expected
    own = KERNELS["down"][0]
    made = combined({"down": own}, usual(CPU))
    assert made.several_grad_warps == expected.several_grad_warps and made.down_m == own["down_m"]


def test_sizes_that_no_kernel_takes_are_refused() -> None:
    for fields in ({"down_m": 1024}, {"down_m": 24}, {"down_warps": 0}, {"grad_chunks": 4}, {"scale_chunk": 16}):
        with pytest.raises(ValueError, match=f"{next(iter(fields))} is"):
            combined({"down": fields})
    with pytest.raises(TypeError, match="sideways_m"):
        combined({"down": {"sideways_m": 32}})
    made = combined({"down": KERNELS["down"][2], "up": {}})
    assert {name: getattr(made, name) for name in KERNELS["down"][2]} == KERNELS["down"][2]
    assert (made.up_m, made.grad_n) == (BITS_16.up_m, BITS_16.grad_n)


# --- every candidate computes the same ---------------------------------------------------------------------------------


def together(number: int) -> Sizes:
    """The candidate of this number of every kernel, in one: they have no field in common."""
    return combined({name: own[number % len(own)] for name, own in KERNELS.items()})


KINDS_TRIED = ("DoRA", "four adapters", "dropout", "DoRA, rank 40")
"""joint; several_grad and inputs; grad and narrow; both kinds of scales. All have down and up."""


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(MOST))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_every_candidate_is_as_exact_as_torch(number: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, more than a block of most; on one processor, and on so many that there are few programs for them."""
    if not SOAK and (number % 2 == 0) == (dtype == torch.float32):
        pytest.skip("every candidate in one dtype and kind; in all under make soak")
    own, at_once = together(number), 1
    monkeypatch.setattr(config, "FLOAT_32", own)
    monkeypatch.setattr(sizes, "processors", lambda device: at_once)
    before = use(CPU, own)
    try:
        for kind in KINDS_TRIED if SOAK else (KINDS_TRIED[number % 3],):

            def case(trial: int, kind: str = kind) -> GroupCase:
                nonlocal at_once
                at_once = 132 if trial % 2 else 1
                settings, bias = KINDS[kind], kind == "dropout"
                return make_case(115 + trial, 141, [137], with_bias=bias, seed=SEED + trial, dtype=dtype, **settings)

            group_is_as_exact(case, 2, dtype, EPILOGUE if kind == "dropout" and number % 2 else ROUTED, SEED)
    finally:
        use(CPU, before)


def test_what_is_settled_keeps_the_sizes_that_its_tables_were_made_for() -> None:
    case = make_case(40, 33, [29], with_bias=False, seed=SEED, dtype=torch.float16, **KINDS["dropout"])
    want = run_group(case, torch.float16, ROUTED)
    drawn, _ = cast(case, torch.float16)

    def settled() -> Any:
        tables = (
            GroupState().prepared(drawn.x, drawn.layers, ROUTED).call(drawn.x, drawn.segments, 0, ROUTED).segment_tables
        )
        return tables and tables.config

    assert settled() is LARGE_16
    make = step_maker(CPU, torch.float16)
    shape = Shape(40, 40, 48)
    before = make("narrow", shape, BITS_16)
    first = before.results()
    own = together(3)
    use(CPU, own)
    try:
        assert sizes_for(torch.float16, CPU) is own and sizes_for(torch.float32, CPU) is FLOAT_32
        assert settled() is own, "the same segments, settled anew"
        again = run_group(case, torch.float16, ROUTED)
        for mine, theirs in zip(before.results(), first, strict=True):
            assert torch.equal(mine, theirs), "a call that was settled before goes on as it was"
    finally:
        use(CPU, None)
    assert sizes_for(torch.float16, CPU) is LARGE_16
    assert all((again[name] - want[name]).norm() <= 0.01 * want[name].norm() for name in want)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_what_is_timed_for_a_kernel_is_the_same_with_each_of_its_candidates(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, so that it is not rounding that is compared."""
    at_once = 132 if name == "few_down" else 1
    monkeypatch.setattr(sizes, "processors", lambda device: at_once)
    shape = SHAPES[name][-1]
    tiny = Shape(75, 77, 67, tuple(min(rank, 24) for rank in shape.ranks), shape.dora)
    make = step_maker(CPU, torch.float32)
    results = []
    for fields in ({}, *KERNELS[name]):
        monkeypatch.setattr(config, "FLOAT_32", combined({name: fields}))
        results.append(make(name, tiny, BITS_16).results())
    want, *others = results
    assert want and all(tensor.isfinite().all() and tensor.norm() > 0 for tensor in want)
    for got in others:
        for mine, theirs in zip(got, want, strict=True):
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# --- measuring, with times that are made up ----------------------------------------------------------------------------


class World:
    """Candidates take `times` (1 where nothing is said), those in `broken` fail; a candidate costs `seconds` of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.times: dict[str, float | tuple[float, ...]] = {}
        self.broken: set[str] = set()
        self.measured: list[str] = []
        self.wrong: set[str] = set()
        monkeypatch.setattr(kernel_tuning, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(kernel_tuning, "paired", self.paired)

    def make(self, name: str, shape: Shape, own: Sizes) -> Step:
        of = {described(fields): combined({name: fields}) for fields in ({}, *KERNELS[name])}
        found = next(
            (key for key, made in of.items() if all(getattr(made, f) == getattr(own, f) for f in KERNELS[name][0])),
            "",
        )
        value = 2.0 if found in self.wrong else 1.0
        return Step(lambda: None, lambda: [torch.full((3,), value)])

    def paired(self, contenders: Any, device: torch.device, **options: Any) -> Timings:
        out = {}
        for contender in contenders:
            timing = out[contender.name] = Timing(contender.name)
            try:
                contender.make()
                if contender.name in self.broken:
                    raise RuntimeError("out of resource: shared memory")
            except Exception as error:
                timing.error = str(error)
                continue
            given = self.times.get(contender.name, 1.0)
            each = given if isinstance(given, tuple) else (given,)
            turn = self.measured.count(contender.name)
            timing.ms = [2.0 * each[turn % len(each)]] * 3
            self.measured.append(contender.name)
            self.now += self.seconds * (contender.name != "usual")
        return Timings(out)


def candidates_of(name: str) -> list[str]:
    return [described(fields) for fields in KERNELS[name]]


def run(world: World, cache: KernelCache, seconds: float = 1e6) -> dict[str, kernel_tuning.Tuned]:
    return {item.name: item for item in tune_kernels(CPU, cache, seconds, world.make)}


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(CPU, tmp_path / "kernels.json")


def test_the_fastest_candidate_is_chosen_and_remembered_and_nothing_is_measured_twice(
    monkeypatch: pytest.MonkeyPatch, cache: KernelCache
) -> None:
    world = World(monkeypatch)
    up, down = candidates_of("up"), candidates_of("down")
    world.times = {up[3]: 0.8, up[1]: 0.9, down[0]: 0.99, down[2]: (0.5, 1.5, 0.5)}
    world.broken = {up[0]}
    out = run(world, cache)
    assert list(out) == list(KERNELS)
    assert described(out["up"].record.fields) == up[3]
    assert out["up"].record.failed == {up[0]: "out of resource: shared memory"}
    assert out["up"].record.ratios[up[3]] == (0.8, 0.8)
    assert out["down"].record.fields == {}, "1 % is noise, and nothing may be slower anywhere"
    assert out["down"].record.ratios[down[2]][1] == 1.5
    assert all(item.left == 0 for item in out.values())
    again = KernelCache(CPU, cache.path)
    assert {name: record.fields for name, record in again.known().items()} == {
        n: i.record.fields for n, i in out.items()
    }
    world.measured.clear()
    second = run(world, again)
    assert world.measured == [] and second["up"].record == out["up"].record


def test_sizes_that_give_other_numbers_are_left_out_however_fast(
    monkeypatch: pytest.MonkeyPatch, cache: KernelCache
) -> None:
    world = World(monkeypatch)
    grad = candidates_of("grad")
    world.times, world.wrong = {grad[0]: 0.1}, {grad[0]}
    out = run(world, cache)["grad"].record
    assert out.fields == {} and "more than rounding" in out.failed[grad[0]]


def test_where_the_usual_sizes_do_not_run_nothing_is_remembered_of_the_others(
    monkeypatch: pytest.MonkeyPatch, cache: KernelCache
) -> None:
    world = World(monkeypatch)
    world.broken = {"usual"}
    out = run(world, cache)
    assert all("out of resource" in item.error and item.tried == 0 for item in out.values())
    assert "not measured: " in kernels.said(out["up"]) and not cache.path.exists()
    assert all(item.left == 0 and not item.error for item in run(World(monkeypatch), cache).values())


def test_measuring_ends_when_the_time_is_over_and_another_call_goes_on(
    monkeypatch: pytest.MonkeyPatch, cache: KernelCache
) -> None:
    world = World(monkeypatch, seconds=2.0)
    out = run(world, cache, seconds=200.0)
    assert 0 < world.now <= 230
    assert sum(item.tried for item in out.values()) > 0 and sum(item.left for item in out.values()) > 0
    assert (
        out["down"].tried > 0
        and [own for own in candidates_of("down") if own in out["down"].record.ratios]
        == (candidates_of("down")[: out["down"].tried])
    ), "what looks best first"
    before, tried = world.now, sum(item.tried for item in out.values())
    second = run(world, KernelCache(CPU, cache.path), seconds=1e5)
    assert world.now > before and tried + sum(item.tried for item in second.values()) == sum(
        len(candidates_of(name)) for name in KERNELS
    )
    none = run(World(monkeypatch), KernelCache(CPU, cache.path.with_name("other.json")), seconds=0.0)
    assert all(item.tried == 0 for item in none.values())


# --- what is remembered, and where it is used --------------------------------------------------------------------------


def put(cache: KernelCache, name: str, number: int) -> None:
    cache.put({name: Record(dict(KERNELS[name][number]), {})})


@pytest.mark.parametrize("change", ["device", "driver", "versions", "fields", "ratios", "not json", "size", "infinite"])
def test_a_file_of_another_device_or_driver_or_a_broken_one_is_ignored_with_a_warning(
    change: str, cache: KernelCache
) -> None:
    put(cache, "up", 1)
    content = json.loads(cache.path.read_text())
    assert content["driver"] and content["versions"]["triton"]
    if change in ("device", "driver", "versions"):
        content[change] = "another"
    elif change == "fields":
        content["kernels"]["up"]["fields"]["up_m"] = 4096
    elif change == "ratios":
        content["kernels"]["up"]["ratios"] = {"usual": [1.0, -1.0]}
    elif change == "infinite":
        content["kernels"]["up"]["fields"]["up_m"] = float("inf")
    elif change == "size":
        content["kernels"]["up"]["fields"]["sideways_m"] = 32
    cache.path.write_text("{" if change == "not json" else json.dumps(content))
    with pytest.warns(UserWarning, match="sizes of kernels measured earlier are not used"):
        assert cache.known() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(cache, "up", 2)
        assert cache.known()["up"].fields == KERNELS["up"][2]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, cache: KernelCache) -> Callable[[], torch.device]:
    """As if the CPU were a GPU that has this cache."""
    monkeypatch.setattr(kernel_sizes, "KernelCache", lambda device: cache)
    monkeypatch.setattr(identity, "has_kernels", lambda device: True)
    kernel_sizes.tuned.cache_clear()
    yield lambda: CPU  # type: ignore[misc]
    kernel_sizes.forget(CPU)


def test_a_run_uses_what_was_measured_by_one_look_and_plans_measured_with_other_sizes_are_not_used(
    on_a_gpu: Any, cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlanCache(CPU, tmp_path / "plans.json").identity
    assert "kernels" not in plain["versions"]
    put(cache, "up", 1)
    kernel_sizes.forget(CPU)
    reads: list[int] = []
    read = KernelCache.read
    monkeypatch.setattr(KernelCache, "read", lambda self: reads.append(1) or read(self))
    for _ in range(3):
        kernel_sizes.use_tuned(CPU)
    assert len(reads) == 1
    own = sizes_for(torch.bfloat16, CPU)
    assert {name: getattr(own, name) for name in KERNELS["up"][1]} == KERNELS["up"][1]
    first = PlanCache(CPU, tmp_path / "plans.json").identity["versions"]["kernels"]
    put(cache, "up", 2)
    kernel_sizes.forget(CPU)
    assert PlanCache(CPU, tmp_path / "plans.json").identity["versions"]["kernels"] != first
    assert sizes_for(torch.bfloat16, CPU) is LARGE_16


def test_a_cpu_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_sizes.tuned.cache_clear()
    monkeypatch.setattr(kernel_sizes, "KernelCache", lambda device: pytest.fail("a CPU has no kernels"))
    kernel_sizes.use_tuned(CPU)
    assert kernel_sizes.identity(CPU) is None and sizes_for(torch.bfloat16, CPU) is LARGE_16
    assert kernels.tune_sizes(CPU, 5.0, Screen(file=io.StringIO())) == 0.0


def test_tune_says_what_was_chosen_and_the_doctor_too(
    on_a_gpu: Any, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    world = World(monkeypatch)
    best = candidates_of("up")[2]
    world.times, world.broken = {best: 0.75}, {candidates_of("grad")[0]}
    monkeypatch.setattr(kernels, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(kernels, "KernelCache", lambda device: cache)
    monkeypatch.setattr(
        kernels,
        "tune_kernels",
        lambda device, own, seconds: tune_kernels(device, own, seconds, world.make),
    )
    assert "the usual ones" in kernels.described_sizes(CPU)
    kernels.tune_sizes(CPU, 1e4, Screen(file=shown, width=200))
    printed = shown.getvalue()
    chosen = f"{best}, 0.750 of the usual time, 0.750 at worst"
    assert f"up: {chosen}; {len(candidates_of('up'))} candidates measured now, 0 left" in printed
    assert f"down: usual; {len(candidates_of('down'))} candidates measured now, 0 left" in printed
    assert "left out: grad: " in printed and str(cache.path) in printed
    assert f"{len(KERNELS)} kernels measured here; not the usual ones: up ({best})" == kernels.described_sizes(CPU)
    own = sizes_for(torch.bfloat16, CPU)
    assert all(getattr(own, name) == value for name, value in KERNELS["up"][_index("up", best)].items())


def _index(name: str, of: str) -> int:
    return [described(fields) for fields in KERNELS[name]].index(of)
