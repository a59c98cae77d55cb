"""Every objective against a plain formula over whole logits: alone, beside the others, split over microbatches, of one label,
and beside a neighbour that is not a number; after every kind of output layer; in float64 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import TINY, tiny_model
from peft import LoraConfig

from packlora.adapters.attach import attach
from packlora.adapters.embeddings import change_embeddings
from packlora.adapters.spec import resolve
from packlora.base.packing import packed_logits, prepare_model
from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.data.preference import ComparedSample
from packlora.data.targets import TargetSample
from packlora.engine import heads, weighing
from packlora.engine.collate import collate
from packlora.engine.heads import token_losses
from packlora.engine.objective import Objective
from packlora.engine.objectives.configured import objective_of
from packlora.engine.objectives.function import FunctionObjective
from packlora.engine.objectives.neftune import Neftune, add_noise
from packlora.engine.objectives.policy import CLIPS, POLICY_LOSSES, PolicyObjective, WeightedCrossEntropy
from packlora.engine.objectives.sft.loss import CROSS_ENTROPY
from packlora.engine.objectives.smoothing import LabelSmoothing
from packlora.engine.parts import Part
from packlora.engine.rows import Row
from packlora.ops.cross_entropy import chunked, linear_cross_entropy
from packlora.ops.cross_entropy.parts import VocabularyPart

HEADS = ("frozen", "adapters", "cut", "whole logits")
WEIGHT = 0.37
FACTS = {"units": 7.0, "samples": 3.0, "per_token": 0.4, "divergence": 0.05}
MINE = """
import torch

def sft(logp, rows):
    return -logp

def dpo(logp, rows):
    group = rows.column("group")
    own = [rows.per_sample(torch.where(group == n, logp - rows.column("reference"), 0.0)) for n in (1, 2)]
    return -torch.nn.functional.logsigmoid(0.3 * (own[0] - own[1]))

def ppo(logp, rows):
    ratio, gain = torch.exp(logp - rows.column("logprobs")), rows.column("advantages")
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain), {"ratio": ratio}
ppo.weights = "row"

def gspo(logp, rows):
    lengths = rows.per_sample(torch.ones_like(logp))
    ratio = torch.exp(rows.per_sample(logp - rows.column("logprobs")) / lengths)
    return -ratio * rows.first(rows.column("advantage"))
"""


@dataclass(frozen=True, eq=False)
class Case:
    """An objective with its samples.

    formula: the loss of a sample from log-probabilities and those of the reference. short: a sample of as few labels as
    there may be.
    """

    name: str
    objective: Objective
    samples: list[Sample]
    formula: Callable[[Sample, torch.Tensor, torch.Tensor], torch.Tensor]
    short: Sample


class Given:
    """Log-probabilities of a reference that are numbers drawn once."""

    def __init__(self) -> None:
        self.known: dict[int, np.ndarray] = {}

    def own(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        raise AssertionError("nothing is estimated here")

    def reference(self, samples: Sequence[Sample], keep: bool = False) -> list[np.ndarray]:
        return [reference_of(sample) for sample in samples]


def reference_of(sample: Sample) -> np.ndarray:
    return -3 - 4 * np.random.default_rng(sample.num_tokens).random(sample.num_labels)


def single(length: int, labels: int | None = None) -> Sample:
    draw = np.random.default_rng(length)
    is_label = np.arange(length) >= (length - labels if labels is not None else 3)
    found = int(is_label.sum())
    columns = {
        "logprobs": -5 - 2 * draw.random(found), "advantages": draw.standard_normal(found),
        "advantage": np.array(draw.standard_normal()),
    }  # fmt: skip
    return Sample(draw.integers(3, TINY["vocab_size"], length).astype(np.int32), is_label, columns=columns)


def judged_of(sample: Sample) -> ComparedSample:
    return ComparedSample(sample.ids, sample.is_label, lengths=(sample.num_tokens,))


def pair(first: int, second: int, context: bool = False) -> ComparedSample:
    ids = np.random.default_rng(first).integers(3, TINY["vocab_size"], first + second).astype(np.int32)
    place = np.concatenate([np.arange(first), np.arange(second)])
    is_context = (np.arange(first + second) < 4) & (place > 0) if context else None
    is_label = place >= 4 if is_context is None else (place >= 4) | is_context
    return ComparedSample(ids, is_label, lengths=(first, second), is_context=is_context)


def dpo_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    _, chosen, _ = sample.group_counts
    margin = (logp - reference)[:chosen].sum() - (logp - reference)[chosen:].sum()
    return torch.log1p(torch.exp(-0.3 * margin))


def orpo_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    before, chosen, _ = sample.group_counts
    a, b = logp[before : before + chosen].mean(), logp[before + chosen :].mean()
    odds = a - b - torch.log1p(-torch.exp(a)) + torch.log1p(-torch.exp(b))
    return -logp[: before + chosen].sum() * FACTS["per_token"] + 0.3 * torch.log1p(torch.exp(-odds))


def kto_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return 1.5 / (1 + torch.exp(0.3 * ((logp - reference).sum() - FACTS["divergence"])))


def ppo_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logp - torch.from_numpy(sample.columns["logprobs"]))
    gain = torch.from_numpy(sample.columns["advantages"])
    clipped = torch.where(gain > 0, ratio < 1.2, ratio > 0.8)
    bound = torch.where(gain > 0, gain.new_tensor(1.2), gain.new_tensor(0.8))
    return -(torch.where(clipped, ratio, bound) * gain).sum()


def gspo_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    mean = (logp - torch.from_numpy(sample.columns["logprobs"])).mean()
    return -torch.exp(mean) * float(sample.columns["advantage"])


def sft_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return -logp.sum()


def targets(length: int, labels: int | None = None) -> TargetSample:
    """Soft targets, several at a place, none of them a token of the sample, with weights of both signs."""
    draw = np.random.default_rng(length)
    found = labels or 2 * length
    places, tokens = np.sort(draw.integers(0, length, found)), draw.integers(3, TINY["vocab_size"], found)
    ids = draw.integers(3, TINY["vocab_size"], length)
    return TargetSample.of(ids, places, tokens, {"weights": draw.standard_normal(found)})


def sampled(length: int, labels: int | None = None) -> Sample:
    """Tokens with bounds of their own, some of which a mean over the sample does not count."""
    sample = single(length, labels)
    draw = np.random.default_rng(length + 100)
    low = draw.uniform(0.1, 0.9, sample.num_labels)
    counted = np.arange(sample.num_labels) % 3 != 1
    return replace(
        sample, columns={**sample.columns, "low": low, "high": low + 0.5, "counted": counted.astype(np.float64)}
    )


def weighted_formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return -torch.from_numpy(sample.columns["weights"]) @ logp


def policy_formula(name: str) -> Callable[[Sample, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Token by token, in words of the definition."""

    def formula(sample: Sample, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        known = {key: own.tolist() for key, own in sample.columns.items() if own.ndim}
        gains, away = known["advantages"], [p - q for p, q in zip(logp, known["logprobs"], strict=True)]
        used = [one > 0 for one in known["counted"]]
        mean = sum(float(a.detach()) for a, use in zip(away, used, strict=True) if use) / max(sum(used), 1)
        total = logp.new_zeros(())
        for p, a, gain, low, high, use in zip(logp, away, gains, known["low"], known["high"], used, strict=True):
            ratio = torch.exp(a)
            if name == "importance_sampling":
                total = total - ratio * gain
            elif name == "dro":
                total = total - p * gain + 0.4 * a**2
            elif name == "cispo":
                total = total - min(max(float(ratio.detach()), low), high) * p * gain
            else:
                if name == "gspo":
                    ratio = float(np.exp(mean)) * torch.exp(a - a.detach())
                bound = min(max(float(ratio.detach()), low), high)
                if name == "ppo" or use:
                    total = total - (ratio * gain if float(ratio.detach()) * gain <= bound * gain else bound * gain)
        return total

    return formula


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    file = tmp_path_factory.mktemp("objective") / "mine.py"
    file.write_text(MINE)

    def preference(**keys: Any) -> Objective:
        return objective_of(TrainConfig.model_validate({"beta": 0.3} | keys))

    def mine(name: str, samples: list[Sample]) -> Objective:
        return FunctionObjective(f"{file}:{name}").tried(samples)

    rows, judged = [single(9), single(23), single(14)], []
    for length in (8, 21, 12):
        judged.append(judged_of(single(length)))
    pairs, whole = [pair(9, 12), pair(17, 7), pair(6, 6)], [pair(9, 12, True), pair(17, 7, True), pair(6, 8, True)]
    kto, short = preference(trainer="kto", desirable_weight=1.5), single(6, 1)
    soft, tokens = [targets(9), targets(23), targets(14)], [sampled(9), sampled(23), sampled(14)]
    found = [
        Case("sft", CROSS_ENTROPY, rows, sft_formula, short),
        Case("dpo", preference(trainer="dpo"), pairs, dpo_formula, pair(5, 5)),
        Case("orpo", preference(trainer="orpo"), whole, orpo_formula, pair(5, 5, True)),
        Case("kto", kto, judged, kto_formula, judged_of(short)),
        Case("mine sft", mine("sft", rows), rows, sft_formula, short),
        Case("mine dpo", mine("dpo", pairs), pairs, dpo_formula, pair(5, 5)),
        Case("mine ppo", mine("ppo", rows), rows, ppo_formula, short),
        Case("mine gspo", mine("gspo", rows), rows, gspo_formula, short),
        Case("targets", WeightedCrossEntropy(), soft, weighted_formula, targets(6, 1)),
    ]
    for name in POLICY_LOSSES:
        found.append(Case(name, PolicyObjective(name, beta=0.8), tokens, policy_formula(name), sampled(6, 1)))
    for case in found:
        assert case.objective.learn(case.samples, [], Given())
    return found


@cache
def model_of(head: str, dtype: torch.dtype, count: int) -> tuple[Any, Any, list[list[torch.nn.Parameter]]]:
    """A model with so many adapters."""
    model = tiny_model("llama", dtype)
    prepare_model(model, False)
    targets = ["q_proj", "down_proj"] + ["lm_head"] * (head == "adapters")
    config = LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM")
    specs = {str(number): resolve(config, model, str(number)) for number in range(count)}
    attached, adapters = attach(model, specs, 0)
    change_embeddings(model, attached, add_noise)
    parameters = [list(adapter.named_parameters().values()) for adapter in adapters]
    with torch.no_grad():
        for index, parameter in enumerate(p for own in parameters for p in own):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            parameter.copy_(drawn / 8)
    if head == "cut":
        words = TINY["vocab_size"]
        model.lm_head.vocabulary = VocabularyPart(words, 0, words, words, lambda own: own[None], lambda total: None)
    return model, attached, parameters


Outcome = tuple[torch.Tensor, list[torch.Tensor]]
"""Sums of an adapter, and the gradients of its parameters."""


def part_of(case: Case, adapter: int, samples: Sequence[Sample] | None = None, **own: Any) -> Part:
    rows = [Row(sample, (None, 0, n)) for n, sample in enumerate(case.samples if samples is None else samples)]
    return Part(adapter, rows, case.objective, WEIGHT, facts=FACTS, **own)


def run(parts: Sequence[Part], head: str, dtype: torch.dtype, count: int) -> dict[int, Outcome]:
    """What a microbatch gives each of its adapters."""
    model, attached, parameters = model_of(head, dtype, count)
    batch = collate(parts, torch.device("cpu"))
    with attached.active(batch.owners):
        losses = token_losses(model, batch, batch.weights_L, head != "whole logits")
        losses.total.backward()
    out = {}
    for part in parts:
        out[part.adapter] = (
            losses.sums[part.adapter],
            [p.grad.clone() for p in parameters[part.adapter] if p.grad is not None],
        )
        for parameter in parameters[part.adapter]:
            parameter.grad = None
    return out


def oracle(case: Case, part: Part, head: str, dtype: torch.dtype, count: int) -> Outcome:
    """The formula by autograd over whole logits, sample by sample."""
    model, attached, parameters = model_of(head, dtype, count)
    batch = collate([part], torch.device("cpu"))
    at = (batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, batch.rows_L)
    with attached.active(batch.owners):
        logp_LV = packed_logits(model, *at).double().log_softmax(-1)
        labels = sum(row.sample.num_labels for row in part.rows)
        logp_L = logp_LV[:labels].gather(1, batch.labels_L[:labels, None])[:, 0]
        losses = [
            case.formula(row.sample, logp, torch.from_numpy(reference_of(row.sample)))
            for row, logp in zip(part.rows, logp_L.split([row.sample.num_labels for row in part.rows]), strict=True)
        ]
        total = torch.stack(losses).sum()
        gradients = torch.autograd.grad(WEIGHT * total, parameters[part.adapter])
    return total.detach()[None], list(gradients)


def error(got: Outcome, want: Outcome) -> float:
    """Largest difference of the gradients and of the loss, beside their size."""
    pairs = [(got[0][:1], want[0][:1]), *zip(got[1], want[1], strict=True)]
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of output layer, its rows in several chunks."""
    for module in (chunked, linear_cross_entropy):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 1)
    return str(request.param)


def test_alone_each_has_the_loss_and_the_gradients_of_its_formula(head: str, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        part = part_of(case, number)
        got = run([part], head, torch.float64, len(cases))[number]
        assert error(got, oracle(case, part, head, torch.float64, len(cases))) < 1e-10, case.name
        if case.name in CLIPS:
            assert 0 < got[0][1] < sum(sample.num_labels for sample in case.samples), "some ratios are clipped"


def test_beside_all_others_each_has_what_it_has_alone(head: str, cases: list[Case]) -> None:
    """Also beside smoothed labels and noisy embeddings."""
    plain = [part_of(case, number) for number, case in enumerate(cases)]
    others = {0: (LabelSmoothing(0.2), Neftune(7, 5.0))}
    together = [replace(part, terms=others.get(part.adapter, ())) for part in plain]
    found = run(together, head, torch.float64, len(cases))
    for part, case in zip(plain, cases, strict=True):
        wanted = run([together[part.adapter]], head, torch.float64, len(cases))[part.adapter]
        assert error(found[part.adapter], wanted) < 1e-10, case.name
        if part.adapter == 0:
            assert error(wanted, run([part], head, torch.float64, len(cases))[0]) > 1e-4, "the terms do something"


def test_split_over_microbatches_each_adds_up_to_the_whole(head: str, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        (sums, gradients), *others = [
            run([part_of(case, number, some)], head, torch.float64, len(cases))[number]
            for some in (case.samples[:1], case.samples[1:])
        ]
        for more, grads in others:
            sums, gradients = sums + more, [a + b for a, b in zip(gradients, grads, strict=True)]
        whole = run([part_of(case, number)], head, torch.float64, len(cases))[number]
        assert error((sums, gradients), whole) < 1e-10, case.name
        torch.testing.assert_close(sums, whole[0], rtol=1e-10, atol=1e-12)


def test_one_sample_of_one_label_is_learnt(head: str, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        sample, known = case.short, cast(Any, case.objective)
        if (references := getattr(known, "_references", None)) is not None:
            own = reference_of(sample)
            grouped = own
            if isinstance(sample, ComparedSample):
                grouped = [part.sum() for part in np.split(own, np.cumsum(sample.group_counts)[:2])]
            references[id(sample)] = own if case.name.startswith("mine") else np.array(grouped)
        part = part_of(case, number, [sample])
        got = run([part], head, torch.float64, len(cases))[number]
        assert error(got, oracle(case, part, head, torch.float64, len(cases))) < 1e-10, case.name


def test_a_neighbour_that_is_not_a_number_stays_by_itself(head: str, cases: list[Case]) -> None:
    parts = [part_of(case, number) for number, case in enumerate(cases)]
    healthy = run(parts, head, torch.float64, len(cases))
    _, _, parameters = model_of(head, torch.float64, len(cases))
    for broken in (0, 1, 6):
        before = [parameter.detach().clone() for parameter in parameters[broken]]
        with torch.no_grad():
            for parameter in parameters[broken]:
                parameter.fill_(torch.nan)
        found = run(parts, head, torch.float64, len(cases))
        with torch.no_grad():
            for parameter, own in zip(parameters[broken], before, strict=True):
                parameter.copy_(own)
        assert found[broken][0][0].isnan()
        for number, case in enumerate(cases):
            assert number == broken or error(found[number], healthy[number]) < 1e-10, case.name


def test_in_bfloat16_each_is_as_close_as_torch_over_whole_logits(head: str, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        part = part_of(case, number)
        exact = oracle(case, part, head, torch.float64, len(cases))
        own = error(run([part], head, torch.bfloat16, len(cases))[number], exact)
        torchs = error(oracle(case, part, head, torch.bfloat16, len(cases)), exact)
        assert own <= 2 * torchs + 1e-2, case.name


def test_an_output_layer_with_adapters_is_run_once_where_weights_are_known_by_row(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = 0, chunked.chunked_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(chunked, "chunked_cross_entropy", counted)
    by_name = {case.name: (number, case) for number, case in enumerate(cases)}
    for names, passes in ((["sft"], 1), (["mine ppo"], 1), (["sft", "ppo", "targets"], 1), (["dpo", "mine ppo"], 2)):
        calls = 0
        run([part_of(by_name[name][1], by_name[name][0]) for name in names], "adapters", torch.float64, len(cases))
        assert calls == passes, names


def test_no_objective_waits_for_the_device(cases: list[Case]) -> None:
    """On the meta device, whatever reads a value raises."""
    batch = collate([part_of(case, number) for number, case in enumerate(cases)], torch.device("meta"))
    sums, factors_L = heads.judge(torch.empty(len(batch.labels_L), device="meta"), batch)
    assert factors_L is not None and len(factors_L) == len(batch.labels_L)
    assert [len(own) for own in sums.values()] == [1 + len(case.objective.metrics) for case in cases]


def test_a_wrong_gradient_would_be_seen(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    original = weighing.weighed
    wrong = lambda rows: [own._replace(factors_L=own.factors_L * 1.001) for own in original(rows)]  # noqa: E731
    monkeypatch.setattr(weighing, "weighed", wrong)
    for name in ("dpo", "mine ppo", "targets"):
        number, case = next((n, case) for n, case in enumerate(cases) if case.name == name)
        for head in HEADS:
            part = part_of(case, number)
            got = run([part], head, torch.float64, len(cases))[number]
            assert error(got, oracle(case, part, head, torch.float64, len(cases))) > 1e-4, head
