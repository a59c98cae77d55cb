"""What goes wrong on the way of a microbatch by graphs: memory that runs out, steps between, jobs of any number and kind.

Bodies run a decoder that is one product, so no kernel is interpreted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, tiny_model
from graph_runs import Pretended, Run
from packed import PackedSample, parts
from peft import LoraConfig
from triton.runtime.errors import OutOfResources

from packlora.adapters.spec import resolve
from packlora.data.encode import Sample
from packlora.engine import between, passes, recorded
from packlora.engine.graphs import GraphedDevice
from packlora.engine.parts import Part
from packlora.engine.passes import MicrobatchResult, SingleDevice, insist, run_microbatch
from packlora.engine.recorded import TRIES, Body, Shape
from packlora.ops.lora_linear.frozen import InMemory
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.parallel.cut import Slices
from packlora.runtime.cuda_graphs import why_no_graphs

WEIGHTS = np.array([0.01, 0.02, 0.03])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    own = Run(Pretended)
    monkeypatch.setattr(recorded, "hidden_states", decoder(own))
    return own


def decoder(run: Run) -> Callable[..., torch.Tensor]:
    """Every adapter has part in the hidden states of all tokens."""

    def hidden(model: Any, ids_T: torch.Tensor, *_: Any) -> torch.Tensor:
        return model.get_input_embeddings()(ids_T) * (1 + sum((p * p).mean() for p in run.parameters()))

    return hidden


def samples(*lengths: int, owner: int = 2) -> list[Part]:
    own = [Sample(np.arange(n, dtype=np.int32) % 300 + 3, np.arange(n) > 2) for n in lengths]
    return parts([PackedSample(owner, sample, 0, 0, None) for sample in own], WEIGHTS)


def train(run: Run, *packed: list[Part]) -> MicrobatchResult:
    for one in packed:
        result = run_microbatch(run.executor, one)
        run.collect({part.adapter for part in one}, step=False)
    return result


def once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[RuntimeError], held: list[Any] | None = None
) -> None:
    """The next call raises after it has run, with its result in its frame."""
    original, failed = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if failed:
            return result
        failed.append(1)
        if held is not None:
            held.append(weakref.ref(getattr(result, "last_hidden_state", result)))
        raise error("once")

    monkeypatch.setattr(owner, name, call)


def alive_in_forwards(monkeypatch: pytest.MonkeyPatch, watched: list[Any]) -> list[list[bool]]:
    """At every forward without a graph from now on, which of these weak references hold something."""
    original, alive = SingleDevice.forward, []

    def forward(self: SingleDevice, *args: Any) -> Any:
        gc.collect()
        alive.append([own() is not None for own in watched])
        return original(self, *args)

    monkeypatch.setattr(SingleDevice, "forward", forward)
    return alive


ERRORS = [torch.OutOfMemoryError, RuntimeError]


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "not recorded"])
def test_nothing_of_a_forward_that_failed_is_alive_when_it_is_tried_without_a_graph(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError]
) -> None:
    held: list[Any] = []
    train(run, samples(50))  # without a failure
    once(monkeypatch, recorded, "hidden_states", error, held)
    alive = alive_in_forwards(monkeypatch, held)
    train(run, samples(50))
    assert alive == [[False]]


def test_nothing_of_an_evaluation_that_failed_is_alive_when_it_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    train(run, samples(50))
    original, alive = passes.collate, []

    def collated(*args: Any, **kwargs: Any) -> Any:
        if held:
            gc.collect()
            alive.append(held[0]() is not None)
        return original(*args, **kwargs)

    monkeypatch.setattr(passes, "collate", collated)
    once(monkeypatch, run.executor.single.base.model.base_model, "forward", torch.OutOfMemoryError, held)
    run.executor.evaluate(samples(50))
    assert alive == [False]


def test_nothing_of_a_failed_backward_is_alive_when_it_is_tried_without_a_graph(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    train(run, samples(50))

    def failing(body: Body) -> Any:
        held.append(weakref.ref(body._outputs[0]))
        raise RuntimeError("no graph takes this")

    monkeypatch.setattr(Body, "_run_backward", failing)
    alive = alive_in_forwards(monkeypatch, held)
    train(run, samples(50))
    assert alive == [[False]]


def test_no_graph_holds_its_memory_when_a_backward_that_failed_is_tried_without(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a recorder share one pool of memory, of which nothing is given back while one of them is there."""
    recordings: list[Any] = []

    class Watched(Pretended):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            recordings.append(weakref.ref(own := super().record(function)))
            return own

    run.executor._new_recorder = Watched
    train(run, samples(50))
    (body,) = run.executor._bodies.values()
    copied = [(2, torch.zeros(3), torch.ones(3))]
    body._moving.ready(SimpleNamespace(refresh=lambda: None, refresh_scales=lambda: None, copies=lambda: copied))
    del body
    train(run, samples(50), samples(50))
    assert len(recordings) == 3, "forward, backward and copies"
    once(monkeypatch, between.Between, "backward", torch.OutOfMemoryError)
    alive = alive_in_forwards(monkeypatch, recordings)
    train(run, samples(50))
    assert alive == [[False] * 3]


@pytest.mark.parametrize("where", ["of the layers", "of the loss"])
def test_memory_that_runs_out_in_a_backward_beside_graphs_is_tried_without_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    train(run, samples(50), samples(50), samples(50))
    assert any(body.recorded for body in run.executor._bodies.values())
    owner, name = (Body, "_run_backward") if where == "of the layers" else (between.Between, "backward")
    once(monkeypatch, owner, name, torch.OutOfMemoryError)
    got = train(run, samples(900))
    assert not run.executor._bodies and not run.told
    want = run.executor.single.evaluate(samples(900))
    torch.testing.assert_close(got.sums, want.sums)


def test_memory_that_runs_out_outside_of_microbatches_costs_graphs_and_nothing_else(run: Run) -> None:
    """They are recorded anew twice; then there are none any more."""
    for times in range(1, TRIES + 1):
        train(run, samples(50), samples(50), samples(50))
        assert any(body.recorded for body in run.executor._bodies.values())
        lacks = iter([torch.OutOfMemoryError("of a step"), None])

        def step(lacks: Any = lacks) -> int:
            if (lack := next(lacks)) is not None:
                raise lack
            return len(run.executor._bodies)

        assert insist(run.executor, step) == 0
        assert run.executor._out_of_memory == times and bool(run.told) == (times == TRIES)
    want = run.executor.single.evaluate(samples(50))
    torch.testing.assert_close(train(run, samples(50)).sums, want.sums)
    assert not run.executor._bodies


def test_where_other_processes_take_part_memory_that_runs_out_is_no_reason_to_go_on_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for messages of the shape that was recorded, and are told by the end of this process."""
    run.executor.single.base.storage = Slices(can_record=True)
    run.executor = GraphedDevice(run.executor.single, run.buffers, True, 64, run.told.append, Pretended)
    train(run, samples(50), samples(50), samples(50))
    bodies = list(run.executor._bodies.values())
    assert [body.recorded for body in bodies] == [True]
    once(monkeypatch, between.Between, "backward", torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        train(run, samples(50))
    assert not run.told
    assert run.executor._bodies
    run.executor.free()
    assert run.executor._bodies, "theirs would go on"
    run.executor.release()
    assert not run.executor._bodies, "their group of processes ends after them"
    assert not bodies[0].recorded, "frames of the error may hold it"


def test_what_the_end_of_graphs_raises_hides_no_error_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kernel that has failed: from then on each call to the device raises."""

    def fails(self: GraphedDevice) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(GraphedDevice, "_drop", fails)
    for storage in (InMemory(), Slices(can_record=True)):
        run.executor.single.base.storage = storage
        GraphedDevice(run.executor.single, run.buffers, True, 64, recorder=Pretended).release()


@pytest.mark.parametrize("error", [OutOfResources, TypeError])
def test_whatever_a_forward_by_graphs_raises_the_run_goes_on_without_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def failing(*_: Any) -> Any:
        raise OutOfResources(300_000, 232_448, "shared memory") if error is OutOfResources else error("no")

    monkeypatch.setattr(recorded, "hidden_states", failing)
    train(run, samples(50), samples(50))
    (told,) = run.told
    assert error.__name__ in told


def test_graphs_that_memory_does_not_hold_are_given_up_and_that_is_told(run: Run) -> None:
    tried = 0

    class Full(Pretended):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            nonlocal tried
            tried += 1
            raise torch.OutOfMemoryError("no more")

    run.executor._new_recorder = Full
    for _ in range(20):
        train(run, samples(50))
    assert tried <= 3
    assert len(run.told) == 1


def test_more_jobs_than_tokens_of_a_small_microbatch_have_no_graphs() -> None:
    """Nominal segments would be empty."""
    found = reason("low_rank", jobs=recorded.LEAST_TOKENS + 1)
    assert found is not None and "257 jobs" in found
    moving = MovingSegments(Shape.of([20], 0).tokens, range(recorded.LEAST_TOKENS))
    assert all(start < stop for _, start, stop in moving.nominal)


def test_whether_nominal_segments_cover_all_tokens_does_not_depend_on_their_number() -> None:
    """Else microbatches of one run are two cases for the choice of plans."""
    covered = {MovingSegments(T, (0, 1, 2)).nominal[-1][2] == T for T in (256, 384, 512, 768)}
    assert len(covered) == 1


def test_shapes_share_the_room_for_the_gradient_of_the_hidden_states(run: Run) -> None:
    lengths = (300, 600, 1100, 2100)
    train(run, *(samples(length) for length in lengths))
    bodies = run.executor._bodies.values()
    assert len(bodies) == len(lengths)
    assert not any(body._d for body in bodies)
    assert run.executor._room.storage[0].numel() == max(body.shape.tokens for body in bodies) * TINY["hidden_size"]


def reason(dora_dropout: str, jobs: int = 2, family: str = "llama", target: str = "q_proj") -> str | None:
    model = tiny_model(family)
    config = LoraConfig(r=2, use_dora=True, lora_dropout=0.1, target_modules=[target])
    spec = resolve(config, model, "a").with_base_dropped(dora_dropout == "peft")
    job: Any = SimpleNamespace(name="a", adapter=SimpleNamespace(spec=spec))
    base: Any = SimpleNamespace(
        device=torch.device("cuda"),
        form=None,
        fused_loss=True,
        model=model,
        storage=InMemory(),
        modality=None,
    )
    run: Any = SimpleNamespace(dtype="bfloat16", offload_embedding=False)
    model.requires_grad_(False)
    return why_no_graphs(run, base, [job] * jobs)


def test_dora_with_two_base_products_has_no_graphs() -> None:
    assert "'a' is DoRA with dropout" in (reason("peft") or "")


def test_dora_with_dropout_on_an_embedding_has_graphs_since_nothing_of_it_is_dropped() -> None:
    assert reason("peft", target="embed_tokens") is None


def test_linear_attention_has_no_graphs() -> None:
    assert "linear attention is computed sample by sample" in (reason("low_rank", family="qwen3_5") or "")


def test_dora_with_dropout_on_the_low_rank_branch_alone_has_graphs() -> None:
    assert reason("low_rank") is None


def test_a_result_names_what_was_added_up_of_the_adapters_that_own_tokens_and_of_no_other(run: Run) -> None:
    for _ in range(3):
        assert run_microbatch(run.executor, samples(50)).added == {2: run.buffers[2].keys()}
    assert all(body.recorded for body in run.executor._bodies.values())
    assert all(parameter.grad is None for parameter in run.parameters())
    assert not run_microbatch(run.executor.single, samples(50)).added


def test_a_forward_whose_backward_never_came_costs_no_later_microbatch_its_numbers(run: Run) -> None:
    want = train(run, samples(50)).sums
    run.executor.forward(samples(50))
    assert all(map(torch.isfinite, want.values()))
    got = train(run, samples(50)).sums
    assert all(map(torch.isfinite, got.values()))


@pytest.mark.parametrize("where", ["load", "loss"])
def test_what_fails_while_it_is_made_ready_leaves_nothing_that_a_forward_could_take(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of what was made ready before it either, whose buffers it has written over; and nothing is told or given up."""
    plain, buffers = decoder(run), [buffer for own in run.buffers.values() for _, buffer in own.values()]
    monkeypatch.setattr(recorded, "hidden_states", lambda model, ids, places, _: plain(model, ids) * places[:, None])

    def trained(packed: list[PackedSample]) -> list[torch.Tensor]:
        torch._foreach_zero_(buffers)
        return [*train(run, packed).sums.values(), *(buffer.clone() for buffer in buffers)]

    first, second = samples(60), samples(50)
    want = [trained(own) for own in (first, second, first, second)][2:]
    assert all(body.recorded for body in run.executor._bodies.values())
    run.executor.prepare(first)
    assert run.executor._ready.waiting is not None
    owner: Any = Body if where == "load" else between
    once(monkeypatch, owner, "load" if where == "load" else "head_losses", torch.OutOfMemoryError)
    run.executor.prepare(second)
    for packed, own in ((first, want[0]), (second, want[1]))[:: 1 if where == "load" else -1]:
        assert all(map(torch.equal, trained(packed), own))
    assert not run.told and run.executor._out_of_memory == 0


def test_graphs_go_where_memory_is_short_and_layers_are_checkpointed_from_now_on(run: Run) -> None:
    """What they have recorded keeps activations. It is told once."""
    for _ in range(3):
        train(run, samples(50))
    assert run.executor._bodies
    for _ in range(2):
        run.executor.checkpointed()
    assert not run.executor._bodies and run.executor._recorder is None
    (told,) = run.told
    assert "memory has run out" in told
    train(run, samples(50))
    assert not run.executor._bodies
