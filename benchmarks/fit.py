"""`fit`: which model fits on which card, with which settings, beside PEFT under TRL's SFTTrainer.

The table is model x weights x card. A card is one GPU whose memory is capped. What `fit` chooses for a card is the estimate's
matter and takes no GPU, so each choice is trained once, under the cap of the smallest card that gets it, where memory is
shortest; larger cards with the same choice have its figures (`as`). What is predicted not to fit is not tried.

`least` are the settings with the least memory: a sample in a microbatch, checkpointing, without a cap, with the embedding on
the device and on the host, and there also without CUDA graphs, which hold memory of their own, and with the layers' inputs on
the host. `peft` and the others of PEFT_WAYS train the same samples with PEFT, over the same codes where the weights are NF4.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.fit_runs import (
    BATCH,
    GIB,
    LENGTH,
    NF4,
    RANK,
    STEPS,
    WARM,
    folder_of,
    in_codes,
    length_of,
    measured,
    read_sizes,
    run_of,
    train,
    train_peft,
)
from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.shapes import TARGETS, config_of
from packlora.base import liger
from packlora.base.packing import hidden_states, prepare_model
from packlora.config import Run
from packlora.ops.attention.blocks import SampleBlocks, most_blocks, table_of
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.runtime import fit
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import ROOM_SHARE
from packlora.runtime.run import deterministic

SHAPES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
CARDS = (8, 12, 16, 24, 48, 80)
"""GB, in units of 2**30 bytes as vendors count."""
LARGE = ("8B", "14B", "32B")
"""Shapes that are measured beside PEFT."""
PEFT_WAYS = {
    "peft": (1, True, "mc"), "peft_whole": (BATCH, False, ""), "peft_both": (BATCH, True, "c"), "peft_one": (1, False, "m"),
}  # fmt: skip
"""Samples of a batch, whether layers are checkpointed, and the letters of tables, by label of PEFT's cases."""
UNIT = 2**16
"""Bytes that stand for a GB where sizes are toys."""


def fit_cases(options: Options) -> list[Case]:
    """In the order of what is asked first, for runs that end early."""
    shapes = ("0.6B",) if options.quick else SHAPES
    large, small = (shapes, ()) if options.quick else (LARGE, SHAPES[:3])

    def own(part: str, *of: str, label: str = "", **values: Any) -> list[Case]:
        return [case(f"{shape} nf4 {label or part}", part=part, shape=shape, form="nf4", **values) for shape in of]

    def cells(form: str, *of: str) -> list[Case]:
        return [
            case(f"{shape} {form} {card}GB", part="card", shape=shape, form=form, card=card)
            for shape in of
            for card in CARDS
        ]

    def pefts(form: str, label: str, *of: str) -> list[Case]:
        batch, checkpointing, _ = PEFT_WAYS[label]
        way = {"batch": batch, "checkpointing": checkpointing}
        return [case(f"{shape} {form} {label}", part="peft", shape=shape, form=form, **way) for shape in of]

    least: Row = {"host": False, "graphs": True, "offload": False}
    first, last = large[0], large[-1]
    out = own("least", *large, **least)
    out += own("least", *dict.fromkeys((first, last)), label="least_host", **least | {"host": True})
    out += own("least", last, label="least_eager", **least | {"host": True, "graphs": False})
    out += own("least", *dict.fromkeys((first, last)), label="least_offload", **least | {"host": True, "offload": True})
    out += cells("nf4", first) + own("frozen", first) + pefts("nf4", "peft", *dict.fromkeys((first, last)))
    out += [*cells("nf4", shapes[0]), *own("no_graphs", shapes[0])] if shapes[0] != first else own("no_graphs", first)
    out += cells("nf4", *large[1:]) + pefts("nf4", "peft", *large[1:-1]) + cells("bf16", *large)
    out += (
        cells("nf4", *small[1:]) + cells("bf16", *small) + pefts("nf4", "peft", *small) + pefts("bf16", "peft", *shapes)
    )
    return out + [
        one for form in ("nf4", "bf16") for way in PEFT_WAYS if way != "peft" for one in pefts(form, way, *shapes)
    ]


def measure_fit(one: Case, names: list[str], options: Options) -> Row:
    try:
        return PARTS[one.part](one, options)
    except Exception as error:  # the others are measured all the same, and `--resume` tries it again
        return {"failed": {one.part: f"{type(error).__name__}: {error}".splitlines()[0][:300]}}


# --- choices -----------------------------------------------------------------------------------------------------------


def measure_card(one: Case, options: Options) -> Row:
    """What `fit` chooses for a card; and how it trains there, if no smaller card gets the same choice."""
    folder = folder_of(one, options)
    found = choices(folder, one, options)
    chosen, predicted, fits = found[one.card]
    row: Row = {"fits": fits, "predicted_gib": predicted / GIB, "chosen": chosen}
    if not fits:
        return row
    same = [card for card in CARDS if found[card] == found[one.card]]
    if same[0] != one.card:
        return row | {"as": f"{one.shape} {one.form} {same[0]}GB"}
    keys = chosen if options.tiny else {}  # on a GPU training chooses itself, under the cap
    with capped(one.card, options):
        done = measured(options, partial(train, folder, one, options, keys))
    if "taken" in done:
        taken = {key: value for key, value in done["taken"].items() if key != "predicted_bytes"}
        done["as_chosen"] = options.tiny or taken == chosen
    return row | done


def measure_least(one: Case, options: Options) -> Row:
    """The settings with the least memory."""
    if one.host and config_of(f"Qwen3-{one.shape}", options.tiny).tie_word_embeddings:
        return {"failed": {}, "note": "its output layer is the embedding"}
    keys = {fit.MICROBATCH: length_of(options), "gradient_checkpointing": True, "offload_embedding": one.host}
    keys |= ({} if one.graphs else {"cuda_graphs": False}) | ({"activation_offloading": True} if one.offload else {})
    folder = folder_of(one, options)
    predicted = prediction(run_of(folder, one, options, fit="off", **keys))
    return {"predicted_gib": predicted / GIB} | measured(options, partial(train, folder, one, options, keys))


def measure_peft(one: Case, options: Options) -> Row:
    return measured(options, partial(train_peft, folder_of(one, options), one, options))


def measure_no_graphs(one: Case, options: Options) -> Row:
    """Defaults without CUDA graphs."""
    return measured(options, partial(train, folder_of(one, options), one, options, {"cuda_graphs": False}))


def measure_frozen(one: Case, options: Options) -> Row:
    """Seconds of forward and backward of a step's samples, in one microbatch, through the model without an adapter: only the
    embeddings want a gradient. One CUDA graph, replayed."""
    model = in_codes(read_sizes(str(folder_of(one, options) / "base")), NF4, torch.bfloat16, options.device)
    prepare_model(model, gradient_checkpointing=False)
    liger.use_liger(model, "auto")
    model.enable_input_require_grads()
    length = length_of(options)
    ids_T = torch.randint(3, 100, (BATCH * length,), device=options.device)
    lengths = (length,) * BATCH
    table = torch.from_numpy(table_of(lengths, most_blocks(BATCH * length, BATCH)))
    samples = lengths if options.tiny else SampleBlocks(table.to(options.device))
    positions_T, head = torch.arange(length, device=options.device).repeat(BATCH), model.get_output_embeddings()

    def step() -> None:
        hidden_TD = hidden_states(model, ids_T, positions_T, samples)
        linear_cross_entropy(hidden_TD, head.weight, head.bias, ids_T.roll(-1))[1].backward()

    with deterministic():
        if options.tiny:
            step()
            return {"frozen_s": None}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        times = []
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return {"frozen_s": statistics.median(times)}


PARTS = {
    "card": measure_card, "least": measure_least, "peft": measure_peft, "no_graphs": measure_no_graphs,
    "frozen": measure_frozen,
}  # fmt: skip
"""How the cases of each part are measured."""
Choice = tuple[dict[str, Any], int, bool]
"""Keys that `fit` chooses for a card, the bytes that it predicts, and whether they fit."""
_CHOICES: dict[tuple[str, str], dict[int, Choice]] = {}


def choices(folder: Path, one: Case, options: Options) -> dict[int, Choice]:
    """What `fit` chooses by card, for a shape and form."""
    if (one.shape, one.form) in _CHOICES:
        return _CHOICES[one.shape, one.form]
    out: dict[int, Choice] = {}
    prepared = prepare(run_of(folder, one, options))
    for card in CARDS:
        room, own = room_of(card, options), replace(prepared, warnings=[])
        with mock.patch.object(fit, "memory_room", return_value=room):
            found = dict(fit.fitted(own, options.device, prepare).fit)
        predicted = found.pop("predicted_bytes")
        out[card] = found, predicted, predicted <= ROOM_SHARE * room
    _CHOICES[one.shape, one.form] = out
    return out


def prediction(run: Run) -> int:
    """Bytes that are predicted for a run as it is written."""
    prepared: PreparedRun = prepare(run)
    return fit.predicted(run, prepared, prepared.budget)


def room_of(card: int, options: Options) -> int:
    if options.tiny:
        return card * UNIT
    return min(card * GIB, torch.cuda.get_device_properties(options.device).total_memory)


@contextmanager
def capped(card: int, options: Options) -> Iterator[None]:
    """A GPU whose memory is that of a card for this process."""
    if options.tiny:
        yield
        return
    total = torch.cuda.get_device_properties(options.device).total_memory
    torch.cuda.set_per_process_memory_fraction(room_of(card, options) / total, torch.cuda.current_device())
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


# --- figures -----------------------------------------------------------------------------------------------------------


def error_of(row: Row) -> float | None:
    """|predicted - measured| / measured, of memory allocated; None where one is missing."""
    measured, guess = row.get("allocated_gib"), row.get("predicted_gib")
    return None if measured is None or guess is None or row.get("failed") else abs(guess - measured) / measured


def fit_summary(rows: list[Row]) -> Row:
    by_case = {row["case"]: row for row in rows}
    out: Row = {}
    for shape in LARGE:
        key = f"nf4_{shape.lower()}"
        labels = {"gib": "least", "offload_gib": "least_host", "activations_gib": "least_offload", "peft_gib": "peft"}
        if f"{shape} nf4 least_eager" in by_case:  # with the embedding on the device and graphs it is for larger cards
            labels |= {"gib": "least_eager", "device_gib": "least"}
        for name, label in labels.items():
            row = by_case.get(f"{shape} nf4 {label}", {})
            if row.get("gib") is not None and not row.get("failed"):
                out |= {
                    f"{key}_{name}": row["gib"],
                    f"{key}_{name.replace('gib', 'tokens_per_s')}": row["tokens_per_s"],
                }
    rates = {label: row["tokens_per_s"] for label, row in by_case.items() if row.get("tokens_per_s")}

    def rate_of_defaults(shape: str) -> float | None:
        own = (row for row in rows if row["part"] == "card" and (row["shape"], row["form"]) == (shape, "nf4"))
        return next((row["tokens_per_s"] for row in own if not row["chosen"] and row.get("tokens_per_s")), None)

    whole, eager = rate_of_defaults("0.6B"), rates.get("0.6B nf4 no_graphs")
    if whole and eager:
        out["nf4_06b_graphs_speedup"] = whole / eager
    rate, frozen = rate_of_defaults("8B"), by_case.get("8B nf4 frozen", {}).get("frozen_s")
    if rate and frozen:
        out["nf4_8b_over_frozen"] = BATCH * LENGTH / rate / frozen
    here, away = rates.get("8B nf4 least"), rates.get("8B nf4 least_host")
    if here and away:
        out["offload_8b_cost"] = here / away
    if away and (both := rates.get("8B nf4 least_offload")):
        out["activation_offloading_8b_cost"] = away / both
    errors = [error for row in rows if (error := error_of(row)) is not None]
    return out | ({"largest_memory_error": max(errors)} if errors else {})


FIT = Benchmark(
    fit_cases, measure_fit, fit_summary,
    "Qwen3's shapes with random weights, bfloat16 or NF4 with double quantisation (output layer and embedding "
    f"bfloat16); LoRA r {RANK} on {', '.join(TARGETS)}, no dropout; samples of {LENGTH} tokens, {BATCH} to an "
    f"optimizer step, AdamW in float32, {STEPS} steps. A card of N GB is one GPU capped at N * 2**30 bytes by "
    "torch.cuda.set_per_process_memory_fraction; CUDA's own memory, which a real card holds too, is not counted. "
    "card: packlora.train with defaults; each choice of `fit` is trained under the cap of the smallest card that gets "
    "it, and larger cards with the same choice refer to it by `as`. least: no cap; one sample in a microbatch, "
    "gradient checkpointing; least_host: also offload_embedding; least_eager: also cuda_graphs: false, whose gib is "
    "nf4_32b_gib; least_offload: least_host and activation_offloading, whose gib is nf4_*_activations_gib; "
    "activation_offloading_8b_cost: time with it over time without. peft: PEFT, over "
    f"bitsandbytes' Linear4bit where the weights are NF4, batches of one sample, accumulation {BATCH}, gradient checkpointing, "
    f"the trainer that `by` names; peft_whole: a batch of {BATCH} samples, no checkpointing; peft_both: a batch "
    f"of {BATCH} with it; peft_one: of one without it; none has a cap. gib: peak of memory reserved by torch's allocator, "
    "from reading the model to the end; allocated_gib: peak of memory in use, which predicted_gib is compared with. "
    "tokens_per_s: of an optimizer step over the median time between the ends of "
    f"steps, the first {WARM} left out. no_graphs: defaults with cuda_graphs: false. frozen: forward and backward of "
    f"{BATCH} x {LENGTH} tokens through the NF4 model without an adapter, as one CUDA graph; nf4_8b_over_frozen is an "
    "optimizer step with defaults, which is one microbatch of as many, over it.",
    ["packlora"], by_case=True,
)  # fmt: skip
