"""Memory that is short: what a run does about it while it trains, and what `fit` chooses before that."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from test_training import JOBS, adapter, config, distance, train

from packlora.base.host_embedding import why_on_device
from packlora.config import Run
from packlora.data.reader import Reader
from packlora.engine import allocator, memory, passes
from packlora.engine.optimizer import FlatAdamW
from packlora.errors import InputError
from packlora.parallel.alone import OneProcess
from packlora.run_file import run_from
from packlora.runtime import estimate, fit, session
from packlora.runtime.fit import MICROBATCH, fitted, keep_activations, predicted
from packlora.runtime.placement import Placement
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import MEASURES, ROOM_SHARE
from packlora.runtime.resume import check_output
from packlora.runtime.session import Session

Rows = Callable[..., str]
Base = Callable[..., str]
ONE = JOBS[:1]
GIB = 2**30


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))


def tree_of(base: str, out: Path, rows: Rows, **changes: Any) -> dict[str, Any]:
    """A run of one job that says nothing on memory, but for the changes."""
    made = config(base, out, rows, ONE, save_every=1)
    return {key: value for key, value in made.items() if key != MICROBATCH} | changes


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def same(one: Path, other: Path) -> bool:
    a, b = (adapter(folder, ONE[0]["name"]) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Short:
    """A device whose memory holds microbatches of at most so many tokens, with gradient checkpointing of more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, checkpointed: int) -> None:
        self.tried: list[tuple[int, bool]] = []
        original = passes.SingleDevice.backward

        def backward(device: Any, pending: Any) -> Any:
            tokens, ran = sum(pending.batch.num_tokens.values()), original(device, pending)
            taken = any(getattr(own, "gradient_checkpointing", False) for own in device.base.model.modules())
            self.tried.append((tokens, taken))
            if tokens > (checkpointed if taken else most):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return ran

        monkeypatch.setattr(passes.SingleDevice, "backward", backward)


# --- while it trains ---------------------------------------------------------------------------------------------------


def test_microbatches_shrink_where_nothing_is_written_and_a_resumed_run_keeps_the_size(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows, dtype="float64")
    train({**tree, "output_dir": str(tmp_path / "plenty")})
    short = Short(monkeypatch, 80, 80)
    train(tree, max_steps=1)
    assert short.tried[0][0] > 80 and not any(taken for _, taken in short.tried)
    size = record(tmp_path / "out")["fit"][MICROBATCH]
    assert size <= 80 and record(tmp_path / "out")["schedule"]["budget"] == size
    short.tried.clear()
    assert train(tree, resume=True).status == "done"
    assert max(tokens for tokens, _ in short.tried) <= size
    assert distance(*(adapter(tmp_path / name, ONE[0]["name"]) for name in ("plenty", "out"))) < 1e-10


def test_checkpointing_is_taken_before_a_run_is_given_up_with_the_same_bits_and_a_resumed_run_keeps_it(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of microbatches is written, so it stays."""
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows, max_tokens_per_microbatch=150)
    train({**tree, "output_dir": str(tmp_path / "plenty")})
    short = Short(monkeypatch, 20, 150)
    train(tree, max_steps=1)
    assert [taken for _, taken in short.tried][:2] == [False, True]
    told = record(tmp_path / "out")
    assert told["fit"]["gradient_checkpointing"] is True and told["schedule"]["budget"] == 150
    assert sum("gradient_checkpointing is true from now on" in text for text in told["warnings"]) == 1
    short.tried.clear()
    assert train(tree, resume=True).status == "done"
    assert short.tried and all(taken for _, taken in short.tried), "it fails no second time"
    assert same(tmp_path / "out", tmp_path / "plenty")


def test_microbatches_shrink_to_the_longest_sample_before_checkpointing_is_taken(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Short(monkeypatch, 20, 4096)
    assert train(tree_of(tiny_base(), tmp_path / "out", write_rows)).status == "done"
    failed = [tokens for tokens, taken in short.tried if tokens > 20 and not taken]
    assert failed == sorted(failed, reverse=True) and len(failed) > 2
    budget = record(tmp_path / "out")["schedule"]["budget"]
    assert failed[-1] <= budget < failed[-2] and max(tokens for tokens, taken in short.tried if taken) <= budget


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({MICROBATCH: 150, "gradient_checkpointing": False}, ("lower max_tokens", "set gradient_checkpointing: true")),
        ({MICROBATCH: 150, "gradient_checkpointing": True}, ("lower max_tokens_per_microbatch. Predicted",)),
        ({"fit": "off"}, ("Predicted to fit", f"{MICROBATCH}: ", "fit: memory takes it")),
        ({}, ("set quantization: nf4", "data.max_length")),
    ],
)
def test_what_is_written_is_obeyed_and_the_error_says_what_would_fit(
    written: dict[str, Any], said: tuple[str, ...], tiny_base: Base, write_rows: Rows, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    short = Short(monkeypatch, 0, 0)
    with pytest.raises(MemoryError, match=r"out of memory on cpu in a microbatch of .* --resume") as caught:
        train(tree_of(tiny_base(), tmp_path / "out", write_rows, **written))
    assert all(text in str(caught.value) for text in said), caught.value
    assert (len(short.tried) == 1) == bool(written)


def test_checkpoints_that_find_no_memory_end_the_resumed_run_with_what_would_fit_and_stay(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing that makes moments on the device."""

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    tree = tree_of(tiny_base(), tmp_path / "out", write_rows)
    train({**tree, "output_dir": str(tmp_path / "whole")})
    train(tree, max_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(FlatAdamW, "load", out_of_memory)
        with pytest.raises(MemoryError, match=r"the base model and its adapters are loaded: .*Predicted to fit"):
            train(tree, resume=True)
    assert train(tree, resume=True).status == "done"
    assert same(tmp_path / "out", tmp_path / "whole")


def test_a_base_that_does_not_fit_ends_the_run_with_what_would(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written settings; then those of a CPU of so little memory that codes alone fit, and with less, in which nothing does."""
    pytest.importorskip("bitsandbytes")

    def load(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(Placement, "load", load)
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows)
    prepared = prepare(Run.model_validate(tree))
    with pytest.raises(
        InputError, match="out of memory on cpu while the base model and its adapters are loaded: CUDA out of"
    ):
        session._in_memory(load, prepared, SimpleNamespace(size=2))  # type: ignore[arg-type]  # in words, as whoever waits for this process is told

    def least(own: Any) -> int:
        return predicted(own.run.model_copy(update={"gradient_checkpointing": True}), own, own.longest)

    in_codes = [least(own) for _, own in fit.lighter(prepared, torch.device("cpu"))]
    assert in_codes[1] < in_codes[0] < least(prepared)
    said = {}
    for room in (2**50, (in_codes[1] + 8) / ROOM_SHARE, in_codes[1] / ROOM_SHARE - 8):
        monkeypatch.setattr(fit, "memory_room", lambda device, room=room: int(room))
        with pytest.raises(
            MemoryError, match="out of memory on cpu while the base model and its adapters are loaded: CUDA out of"
        ) as caught:
            train(tree)
        said[room] = str(caught.value).partition("1 GiB. ")[2]
    plenty, codes, nothing = said.values()
    assert f"{MICROBATCH}: {prepared.longest}; fit: memory" in plenty and "quantization" not in plenty
    assert (
        "Predicted to fit" in codes and "gradient_checkpointing: true, quantization: nf4; fit: auto takes it" in codes
    )
    assert "Predicted" not in nothing and "set quantization: nf4 or shorten the samples" in nothing


def test_an_evaluation_that_does_not_fit_takes_no_checkpointing(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(passes.SingleDevice, "evaluate", evaluate)
    jobs = [{**ONE[0], "data": {"path": write_rows("a", 8), "eval_path": write_rows("b", 2)}}]
    with pytest.raises(MemoryError, match="out of memory"):
        train({**tree_of(tiny_base(), tmp_path / "out", write_rows), "jobs": jobs})


# --- before it trains --------------------------------------------------------------------------------------------------

LLAMA_8B = ModelShape("llama", 8_030_261_248, 6_979_321_856, 32, 4096, 4096, 1024, 14336, 128256)
"""Sizes of Llama-3.1-8B."""
WIDTHS = (4096, 1024, 1024, 4096, 14336, 14336, 4096)


LEARNS_FROM_REWARDS = {
    "name": "a", "data": {"path": "a.jsonl"}, "adapter": {"r": 16}, "train": {"trainer": "grpo"},
    "rollout": {"reward": "reward.py:length"},
}  # fmt: skip


def run_of(**keys: Any) -> Run:
    job = {"name": "a", "data": {"path": "a.jsonl"}, "adapter": {"r": 16}}
    return run_from({"base_model": "m", "output_dir": "out", "dtype": "bfloat16", "jobs": [job]} | keys)


def prepared_8b(run: Run, codes: int = 0, longest: int = 2048) -> Any:
    """LoRA r 16 on all linear layers of an 8B model. codes: bytes of its linear layers, where they are quantised."""
    modules = {f"{n}.{m}": SimpleNamespace(kind="linear", rank=16) for n in range(32) for m in range(len(WIDTHS))}
    planned = SimpleNamespace(lengths=np.full(100, longest))
    data, spec = SimpleNamespace(label_share=1.0, planned=planned), SimpleNamespace(modules=modules)
    samples = SimpleNamespace(samples=[SimpleNamespace(num_tokens=longest)])
    embedding, head = torch.nn.Embedding(1, 1, device="meta"), torch.nn.Linear(1, 1, False, "meta")
    skeleton = SimpleNamespace(
        supports_gradient_checkpointing=True, config=SimpleNamespace(), get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: head, named_modules=lambda: [("embed_tokens", embedding), ("lm_head", head)],
    )  # fmt: skip
    job: Any = SimpleNamespace(
        data=data, spec=spec, products={}, most=0, trainable=41_943_040, encoded=samples, eval_encoded=samples
    )
    form: Any = SimpleNamespace(held=(LLAMA_8B.linear_parameters, codes)) if codes else None
    budget = 4096 if run.max_tokens_per_microbatch == "auto" else run.max_tokens_per_microbatch
    encoder: Any = SimpleNamespace(skeleton=skeleton)
    return PreparedRun(run, None, budget, LLAMA_8B, [job], form=form, encoder=encoder)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """GiB, keys -> the run as `fit` chose for a card of so much."""
    device = torch.device("cuda")
    monkeypatch.setattr(estimate, "choose_device", lambda name: device)
    monkeypatch.setattr(estimate, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(estimate, "runs_triton", lambda device: True)

    def choose(gib: float, **keys: Any) -> Any:
        monkeypatch.setattr(fit, "memory_room", lambda device: int(gib * GIB))
        codes = {"int8": LLAMA_8B.linear_parameters, "nf4": int(0.5625 * LLAMA_8B.linear_parameters)}

        def again(run: Run, *_: Any) -> Any:
            assert run.quantization is not None
            return prepared_8b(run, codes[run.quantization.method])

        monkeypatch.setattr(fit, "prepared_form", lambda run, *_: again(run).form)
        return fitted(prepared_8b(run_of(**keys)), device, again)

    return choose


@pytest.mark.parametrize(
    ("gib", "keys", "chosen", "fits"),
    [
        (80, {}, {}, True), (40, {}, {}, True),
        # measured under a cap: 4096 tokens end in a MemoryError at 24 GiB, and take 18.0 GiB with checkpointing
        (24, {}, {MICROBATCH: 2048}, True), (20, {}, {"gradient_checkpointing": True}, True),
        (18.8, {}, {MICROBATCH: 2048, "gradient_checkpointing": True}, True),
        (18.1, {}, {"gradient_checkpointing": True, "offload_embedding": True}, True),
        (18, {"offload_embedding": False},
         {MICROBATCH: 2048, "gradient_checkpointing": True, "activation_offloading": True}, True),
        (17.15, {}, {MICROBATCH: 2048, "gradient_checkpointing": True, "offload_embedding": True}, True),
        (16.8, {}, {MICROBATCH: 2048, **dict.fromkeys(MEASURES, True)}, True),
        (16, {}, {MICROBATCH: 2048, **dict.fromkeys(MEASURES, True)}, False),
        (24, {MICROBATCH: 4096}, {"gradient_checkpointing": True}, True),
        (22, {MICROBATCH: 8192}, {"gradient_checkpointing": True}, True),
        (20, {"gradient_checkpointing": False}, {MICROBATCH: 2048, "offload_embedding": True}, False),
        (10, {MICROBATCH: 4096, **dict.fromkeys(MEASURES, True)}, {}, False),
        (20, {"fit": "auto"}, {"gradient_checkpointing": True}, True),
        (12.5, {"fit": "auto"}, {"gradient_checkpointing": True, "quantization": "int8"}, True),
        (9.5, {"fit": "auto", "activation_offloading": False}, {"gradient_checkpointing": True, "quantization": "nf4"}, True),
        (7, {"fit": "auto", "gradient_checkpointing": True},
         {MICROBATCH: 2048, "quantization": "nf4", "offload_embedding": True}, True),
        (12, {"fit": "auto", "quantization": None, "offload_embedding": False, "activation_offloading": False},
         {MICROBATCH: 2048, "gradient_checkpointing": True}, False),
    ],
)  # fmt: skip
def test_the_first_settings_that_fit_on_a_card_are_chosen_and_nothing_that_is_written_is_changed(
    gib: float, keys: dict[str, Any], chosen: dict[str, Any], fits: bool, card: Callable[..., Any]
) -> None:
    made = card(gib, **keys)
    found = dict(made.fit)
    size = found.pop("predicted_bytes")
    assert found == chosen
    assert all(getattr(made.run, key) == value for key, value in keys.items())
    assert made.run.gradient_checkpointing == chosen.get("gradient_checkpointing", made.run.gradient_checkpointing)
    assert made.budget == chosen.get(MICROBATCH, keys.get(MICROBATCH, 4096))
    assert size == predicted(made.run, made, made.budget)
    assert (size <= ROOM_SHARE * gib * GIB) == fits
    said = " ".join(made.warnings)
    assert bool(said) == (bool(chosen) or not fits) and ("may be too much" in said) == (not fits)
    assert ("so numbers change" in said) == ("quantization" in chosen)
    told = "" if fits or keys.get("fit") == "auto" else said.rpartition("Predicted to fit")[2]
    against = "gradient_checkpointing" in keys and not keys["gradient_checkpointing"]
    assert ("with other numbers: " in told and "quantization: " in told) == (bool(told) and not against)
    assert ("4096, gradient_checkpointing: true; fit: memory takes it" in told) == against, "without other numbers"
    assert bool(told) == (not fits and keys.get("fit") != "auto")


@pytest.mark.parametrize(
    ("gib", "keys", "keeps"),
    [
        # 27.7 GiB where they are computed again, 33.2 where they are kept; 85.4 with microbatches of 16384 tokens
        (80, {}, True), (56, {}, True), (55, {}, False), (80, {MICROBATCH: 16384}, False), (80, {MICROBATCH: "auto"}, False),
        (80, {"gradient_checkpointing": True}, False), (80, {"dtype": "float32"}, False),
        # where memory runs out all the same, something can be changed, or else nothing more is kept
        (80, {"gradient_checkpointing": False}, True), (80, {MICROBATCH: 4096}, True),
        (80, {"gradient_checkpointing": False, MICROBATCH: 4096}, False),
        (80, {"parallel": {"tensor": 2}}, False), (80, {"jobs": [LEARNS_FROM_REWARDS]}, False),
    ],
)  # fmt: skip
def test_outputs_of_norms_and_gated_products_are_kept_where_memory_is_plenty(
    gib: float, keys: dict[str, Any], keeps: bool, card: Callable[..., Any]
) -> None:
    made = card(gib, **keys)
    before = made.fit["predicted_bytes"]
    keep_activations(made, torch.device("cuda"))
    assert made.recompute == (not keeps)
    more = 32 * 2 * (2 * 4096 + 14336) * 4096 if keeps else 0
    assert made.fit["predicted_bytes"] == before + more


@pytest.mark.parametrize(("gib", "keeps"), [(80, True), (68, False)])
def test_nothing_more_is_kept_where_graphs_would_find_no_room(
    gib: float, keeps: bool, card: Callable[..., Any]
) -> None:
    """Activations are nearly all that a small base model with large microbatches needs: 36.7 GiB, 70.7 with them twice."""
    made = card(gib, **{MICROBATCH: 8192})
    made.shape = replace(made.shape, parameters=2**29)
    keep_activations(made, torch.device("cuda"))
    assert made.recompute == (not keeps)
    made.recompute = False
    parts = estimate.memory_parts(made.run, made, 8192)
    assert sum(parts.values()) < fit.KEEP_SHARE * gib * GIB
    assert (sum(parts.values()) + parts["activations"] < ROOM_SHARE * gib * GIB) == keeps


def test_nothing_more_is_kept_where_memory_was_short_before(card: Callable[..., Any]) -> None:
    """`fit` had to choose, or memory has run out while an earlier session trained."""
    for key, value in {MICROBATCH: 2048, "offload_embedding": True, "quantization": "nf4"}.items():
        made = card(80)
        made.fit = short = made.fit | {key: value}
        keep_activations(made, torch.device("cuda"))
        assert made.recompute and made.fit == short


def test_a_base_that_cannot_be_quantised_here_is_not(card: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(keys: Any) -> Any:
        raise InputError("bitsandbytes is not installed")

    monkeypatch.setattr(fit, "values_of", refuse)
    made = card(12, fit="auto")
    assert "quantization" not in made.fit
    assert "may be too much" in made.warnings[0] and made.warnings[0].endswith("; bitsandbytes is not installed")


@pytest.mark.slow
def test_a_run_holds_what_was_chosen_before_it_began(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the door of users, on a CPU that is taken for a card: run.json says what and why, a resumed run goes on with it
    whatever is free by then, and a key that is written then counts."""
    out, tree = tmp_path / "out", tree_of(tiny_base(), tmp_path / "out", write_rows)
    train({**tree, "output_dir": str(tmp_path / "plenty")})
    monkeypatch.setattr(session, "FITTED", ("cpu",))
    prepared = Session(Run.model_validate(tree), OneProcess(), False, None, [], Reader())
    prepared.saved, prepared.moment = None, None  # type: ignore[assignment]
    prepared.job_set = SimpleNamespace(left=(), gone=lambda starts: {}, budgets={})  # type: ignore[assignment]
    monkeypatch.setattr(fit, "memory_room", lambda device: 2**50)
    _, plenty = prepared._prepare()
    assert plenty.fit.keys() == {"predicted_bytes"} and not plenty.warnings
    needed = predicted(plenty.run.model_copy(update={"gradient_checkpointing": True}), plenty, plenty.longest)
    monkeypatch.setattr(fit, "memory_room", lambda device: int(needed / ROOM_SHARE) + 1)
    train(tree, max_steps=1)
    told = record(out)
    assert told["fit"] == {MICROBATCH: plenty.longest, "gradient_checkpointing": True, "predicted_bytes": needed}
    assert told["config"]["gradient_checkpointing"] is True and told["schedule"]["budget"] == plenty.longest
    assert sum(text.startswith("fit: ") and "no number changes" in text for text in told["warnings"]) == 1
    monkeypatch.setattr(fit, "memory_room", lambda device: 2**50)
    train(tree, resume=True, max_steps=2)
    assert record(out)["fit"] == told["fit"] and record(out)["schedule"]["budget"] == plenty.longest
    assert train({**tree, "gradient_checkpointing": False, MICROBATCH: 4096}, resume=True).status == "done"
    assert record(out)["schedule"]["budget"] == 4096 and record(out)["config"]["gradient_checkpointing"] is False
    assert distance(*(adapter(folder, ONE[0]["name"]) for folder in (out, tmp_path / "plenty"))) < 1e-5


@pytest.mark.parametrize(
    ("first", "then"), [({}, {"gradient_checkpointing": False}), ({"gradient_checkpointing": True}, {})]
)
def test_checkpoints_stay_on_the_device_where_a_resumed_run_has_none(
    first: dict[str, Any], then: dict[str, Any], tiny_base: Base, write_rows: Rows, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`fit` had put them on the host; the key that it took for them, or found, now says otherwise."""
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows)
    train({**tree, "output_dir": str(tmp_path / "plenty")})
    monkeypatch.setattr(session, "FITTED", ("cpu",))
    monkeypatch.setattr(fit, "_possible", lambda *_: dict.fromkeys(MEASURES, True))
    monkeypatch.setattr(fit, "memory_room", lambda device: 1)
    train(tree | first, max_steps=1)
    assert record(tmp_path / "out")["fit"]["activation_offloading"] is True
    assert train(tree | then, resume=True).status == "done"
    now = record(tmp_path / "out")["config"]
    assert not (now["gradient_checkpointing"] or now["activation_offloading"])
    assert distance(*(adapter(tmp_path / name, ONE[0]["name"]) for name in ("plenty", "out"))) < 1e-5


@pytest.mark.slow
def test_a_new_job_that_trains_the_embedding_is_refused_by_the_key_that_helps_where_fit_put_it_on_the_host(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wrote `offload_embedding`, so it cannot be left out."""
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows)
    with monkeypatch.context() as patched:
        patched.setattr(session, "FITTED", ("cpu",))
        patched.setattr(fit, "_possible", lambda *_: dict.fromkeys(MEASURES, True))
        patched.setattr(fit, "memory_room", lambda device: 1)
        train(tree, max_steps=1)
    assert record(tmp_path / "out")["fit"]["offload_embedding"] is True
    more = {
        "name": "rows",
        "data": {"path": write_rows("rows", 4)},
        "adapter": {"r": 2, "trainable_token_indices": [3]},
    }
    tree["jobs"] = [*tree["jobs"], more]
    with pytest.raises(InputError, match="embed_tokens is trained; fit chose it; set offload_embedding: false"):
        train(tree, resume=True)
    assert train(tree | {"offload_embedding": False}, resume=True).status == "done"


def test_what_was_chosen_for_a_whole_base_is_not_asked_of_one_in_parts(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows)
    train(tree, max_steps=1)
    chosen = {"gradient_checkpointing": True, "offload_embedding": True, "activation_offloading": True}
    found, alone = record(tmp_path / "out"), {"gradient_checkpointing": True}
    (tmp_path / "out" / "run.json").write_text(json.dumps(found | {"fit": chosen}))
    for parallel, kept in (({}, chosen), ({"shard_base": True}, alone), ({"tensor": 2}, alone)):
        run = Run.model_validate({**tree, "dtype": found["config"]["dtype"], "parallel": parallel})
        saved = check_output(run, resume=True)
        assert saved is not None and saved.fit.keys(run) == kept
        assert prepare(run.with_chosen(saved.fit.keys(run))).run.gradient_checkpointing


def test_an_embedding_on_the_host_changes_no_bit(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    """A resumed run may have it elsewhere."""
    tree = tree_of(tiny_base(), tmp_path / "out", write_rows)
    train({**tree, "output_dir": str(tmp_path / "device")})
    train({**tree, "offload_embedding": True}, max_steps=1)
    assert train(tree, resume=True).status == "done"
    assert same(tmp_path / "out", tmp_path / "device")


@pytest.mark.parametrize(
    ("family", "adapter", "why"),
    [
        ("gemma", {}, "its embedding is a GemmaTextScaledWordEmbedding"),
        ("llama", {"trainable_token_indices": [3]}, "embed_tokens is trained"),
    ],
)
def test_an_embedding_that_must_be_on_the_device_is_not_moved(
    family: str, adapter: dict[str, Any], why: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = tree_of(tiny_base(family), tmp_path / "out", write_rows, offload_embedding=True)
    tree["jobs"] = [
        {**ONE[0], "data": {"path": write_rows("a", 4)}, "adapter": {**ONE[0].get("adapter", {}), **adapter}}
    ]
    with pytest.raises(InputError, match=f"offload_embedding: true is not for base_model .*{why}"):
        train(tree)


def test_an_embedding_that_is_the_output_layer_stays_on_the_device() -> None:
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert why_on_device(tied, ()) == "its output layer is the embedding, and is multiplied on the device"
    assert why_on_device(tiny_model("llama"), ()) is None


def test_a_quantised_base_that_was_chosen_is_that_of_the_resumed_run(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    out, tree = tmp_path / "out", tree_of(tiny_base(), tmp_path / "out", write_rows, fit="auto")
    monkeypatch.setattr(session, "FITTED", ("cpu",))
    monkeypatch.setattr(fit, "memory_room", lambda device: 1)
    train(tree, max_steps=1)
    assert record(out)["fit"]["quantization"] == record(out)["config"]["quantization"]["method"] == "nf4"
    monkeypatch.setattr(fit, "memory_room", lambda device: 2**50)
    assert train(tree, resume=True).status == "done"
    for written in ({"quantization": None}, {"fit": "off"}):
        with pytest.raises(InputError, match=r"quantization \(fit chose nf4\) changed"):
            train(tree | written, resume=True)


# --- what there is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "room"), [(1.0, 20), (0.25, 20), (0.1, 8)])
def test_the_room_on_a_gpu_is_what_is_free_within_the_cap_of_the_process(
    fraction: float, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("mem_get_info", (15, 80)), ("memory_reserved", 5)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {1: fraction}.__getitem__)
    assert memory.memory_room(torch.device("cuda")) == memory.memory_room(torch.device("cuda", 1)) == room


def test_a_mac_s_run_is_fitted_into_what_its_gpu_may_have_and_nothing_is_moved_to_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's operations: no kernels, whose estimate is lower. Never run on one."""
    device = torch.device("mps")
    monkeypatch.setattr(estimate, "choose_device", lambda name: device)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 22 * GIB)
    prepared = prepared_8b(run_of())
    made = fitted(prepared, device, lambda run: prepared)
    assert made.fit.pop("predicted_bytes") <= ROOM_SHARE * 22 * GIB  # type: ignore[attr-defined]
    assert made.fit == {"gradient_checkpointing": True} and "no number changes" in made.warnings[0]
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    again = fitted(prepared_8b(run_of(quantization=None)), device, lambda run: prepared)
    assert again.fit.keys() == {MICROBATCH, "gradient_checkpointing", "predicted_bytes"}
    assert "nothing else is left" in again.warnings[0]


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_environment_says_how_memory_is_allocated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for own in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(own, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:128")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    allocator.grow_segments()
    assert told == ([] if name else ["expandable_segments:True"])


def test_fit_leaves_what_is_written() -> None:
    run = run_of(gradient_checkpointing=False)
    assert (
        not run.leaves("gradient_checkpointing") and run.leaves(MICROBATCH) and not run_of(fit="off").leaves(MICROBATCH)
    )
    assert run.with_chosen({"gradient_checkpointing": True}).gradient_checkpointing is False
    chosen = run_of().with_chosen({"gradient_checkpointing": True})
    assert chosen.gradient_checkpointing is True and chosen.leaves("gradient_checkpointing")
    assert run_of().gradient_checkpointing is False
