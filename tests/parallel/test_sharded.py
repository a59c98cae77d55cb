"""A base model of which each rank holds a part: what is trained on it is what is trained on a replica, to the bit, and every
rank gathers the same layers in the same order."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import tiny_model
from ranks import Ranks
from seeds import SOAK
from sharded_runs import STEPS, Case, Training, base_of, difference, replace
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from packlora.adapters import norms
from packlora.base import liger
from packlora.base.packing import prepare_model
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.recompute_hooks import add_recompute
from packlora.parallel.cut import Slices
from packlora.parallel.layout import Layout
from packlora.parallel.sharded import Shards, decoder_layers, made_like
from packlora.runtime.choose import base_bytes, host_bytes
from packlora.runtime.cuda_graphs import why_no_graphs
from packlora.runtime.prepared_job import ModelShape

LAYERS = 3
ODD: dict[str, Any] = {"num_hidden_layers": LAYERS, "vocab_size": 321, "intermediate_size": 97}
"""Sizes that two or three ranks cannot share out evenly."""
FAMILIES = ("llama", "qwen2", "gemma2")
ALL = [
    Case(kind, dropout, bias, adapters, checkpointing, dtype)
    for kind, dropout, bias, adapters, checkpointing, dtype in product(
        ("lora", "rslora", "dora"), (0.0, 0.2), (False, True), (1, 3), (False, True), ("float32", "float64")
    )
]
"""Of one family."""


CHOSEN = {
    "llama": [
        Case("lora", 0.0, True, 3, False, "float32", False), Case("rslora", 0.2, False, 3, False, "float64", False),
        Case("dora", 0.2, True, 1, True, "float64", True), Case("rslora", 0.0, False, 3, False, "float32", True),
    ],
    "qwen2": [
        Case("lora", 0.2, False, 3, True, "float64", True), Case("dora", 0.2, True, 3, False, "float32", True),
        Case("rslora", 0.0, False, 1, True, "float32", False),
    ],
    "gemma2": [
        Case("lora", 0.2, True, 1, True, "float32", False), Case("dora", 0.0, False, 3, False, "float64", False),
        Case("rslora", 0.2, True, 1, False, "float32", True),
    ],
}  # fmt: skip
"""As few of all cases of all families as have every two settings together."""


def chosen(family: str) -> list[Case]:
    """Under `make soak` some more, of all cases of the family."""
    more = random.Random(f"{family} 1030").sample(ALL, 7) if SOAK else []
    return CHOSEN[family] + [replace(case, recompute=at % 2 == 0) for at, case in enumerate(more)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], str]:
    """(family, biases) -> a model in several files, with an index."""
    made: dict[tuple[str, bool], str] = {}

    def make(family: str, biases: bool = False) -> str:
        if (family, biases) not in made:
            path = tmp_path_factory.mktemp(family)
            more = {"attention_bias": True} if biases and family != "qwen2" else {}
            tiny_model(family, **ODD, **more).save_pretrained(path, max_shard_size="150KB")
            assert len(list(path.glob("*.safetensors"))) > 2
            made[family, biases] = str(path)
        return made[family, biases]

    return make


def differences(rank: int, cases: list[tuple[str, Case]]) -> list[tuple[int, float]]:
    return [difference(rank, path, case) for path, case in cases]


def test_the_cases_have_every_two_settings_together() -> None:
    cases = [{"family": family, **vars(case)} for family in FAMILIES for case in CHOSEN[family]]
    values_of_all = {(name, value) for case in ALL for name, value in vars(case).items()}
    assert values_of_all <= set().union(*({(name, value) for name, value in case.items()} for case in cases))
    settings = [{(name, value) for name, value in case.items()} for case in cases]
    values = set().union(*settings)
    pairs = [{a, b} for a in values for b in values if a[0] < b[0]]
    assert [pair for pair in pairs if not any(pair <= own for own in settings)] == []


@pytest.mark.parametrize("family", [pytest.param(one, marks=pytest.mark.soak) for one in FAMILIES[:2]] + [FAMILIES[2]])
def test_training_on_a_sharded_base_is_training_on_a_replica_to_the_bit(
    family: str, folder: Callable[..., str], ranks: Callable[[int], Ranks]
) -> None:
    cases = chosen(family)
    if family == "qwen2":
        cases.append(Case("dora", 0.2, adapters=3, checkpointing=True, dtype="bfloat16", recompute=True))
    found = ranks(2).run(differences, [(folder(family, case.bias), case) for case in cases])
    assert [(case, own) for of_rank in found for case, own in zip(cases, of_rank, strict=True) if own != (0, 0.0)] == []


@pytest.mark.soak
def test_three_ranks_of_which_none_has_an_equal_part(folder: Callable[..., str], ranks: Callable[[int], Ranks]) -> None:
    case = Case("dora", 0.2, adapters=3, dtype="float64")
    assert ranks(3).run(difference, folder("gemma2"), case) == [(0, 0.0)] * 3


def test_kernels_read_weights_that_lie_elsewhere_every_time(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Those around base products, and those of DoRA's norms."""
    tiny_model("qwen2", **{**ODD, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    case = Case("dora", 0.2, checkpointing=True, dtype="bfloat16", targets=("v_proj",), plan="kernels")
    assert ranks(2).run(difference, str(tmp_path), case, 2) == [(0, 0.0)] * 2


def test_experts_are_sharded_too(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    sizes = {**ODD, "intermediate_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=5))
    model.save_pretrained(tmp_path, save_original_format=False)
    for checkpointing in (False, True) if SOAK else (True,):
        case = Case("dora", 0.2, targets=("q_proj", "o_proj"), checkpointing=checkpointing)
        assert ranks(2).run(difference, str(tmp_path), case) == [(0, 0.0)] * 2


def bytes_on(rank: int, folder: str) -> dict[str, int]:
    """Of a sharded model: this rank's rows, and those of layers; what is whole beside the layers in a microbatch, and what a
    layer that runs adds to that, at most, also where it is computed again in the backward."""
    base = base_of(folder, Case(checkpointing=True), True)
    layers = decoder_layers(base.model)
    base.model.reshard()
    rows = {name: p.to_local().nbytes for name, p in base.model.named_parameters() if isinstance(p, DTensor)}
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        whole = [p for p in base.model.parameters() if not isinstance(p, DTensor)]
        seen[name] = max(seen.get(name, 0), sum(p.nbytes for p in whole))

    for name, layer in {"embedding": base.model.get_input_embeddings()}.items() | layers.items():
        inside: Any = getattr(layer, "mlp", layer)  # of a layer, when its weights are here
        inside.register_forward_pre_hook(lambda *_, name=name: look(name))
    Training(base, [{"r": 2, "target_modules": ["q_proj"]}]).microbatch(rank, 0)
    of_layers = sum(own for name, own in rows.items() if name.startswith(tuple(f"{layer}." for layer in layers)))
    beside = seen.pop("embedding")
    return {"rows": sum(rows.values()), "layers": of_layers, "beside": beside, "layer": max(seen.values()) - beside}


def test_a_plan_counts_experts_where_they_are(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Of each rank half of them, and whole those of the layer that runs and of the one that is gathered ahead of it."""
    sizes = {**ODD, "intermediate_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**sizes | {"num_hidden_layers": 5}, num_local_experts=6)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path, save_original_format=False)
    found = ranks(2).run(bytes_on, str(tmp_path))
    run = SimpleNamespace(dtype="float32", parallel=SimpleNamespace(offload_base=True))
    prepared: Any = SimpleNamespace(run=run, shape=ModelShape.of(model), in_codes=(0, 0))
    stored, whole = base_bytes(prepared)
    assert sum(own["rows"] for own in found) == stored
    for own in found:
        counted = own["beside"] + 2 * own["layer"]
        assert (
            counted <= whole <= 1.02 * counted
        )  # small weights of layers, norms and routers, are counted for all of them
        kept = host_bytes(prepared, Layout((("a",), ("b",)), 1, shard=2))
        assert kept == pytest.approx(own["layers"], rel=0.02)


def placed(rank: int) -> tuple[str, list[int], float]:
    """Device, shape and sum of rows that are kept on the host, of a parameter that is shared over GPUs, without one."""
    with mock.patch("torch.cuda.current_device", return_value=rank):
        mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False)
    rows = torch.empty((3, 2)[rank], 4, device="meta")
    empty = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 4)), stride=(4, 1))
    filled = made_like(empty, torch.device("cpu"), empty.dtype)
    filled.to_local().fill_(1)
    assert isinstance(filled, torch.nn.Parameter) and filled.shape == (5, 4) and not filled.requires_grad
    assert filled.device_mesh.device_type == "cuda"
    return filled.device.type, list(filled.to_local().shape), float(filled.to_local().sum())


def test_rows_that_are_kept_on_the_host_are_not_taken_to_the_device_of_the_mesh(ranks: Callable[[int], Ranks]) -> None:
    """FSDP looks where they lie, and refuses those of a layer that are on a GPU when the layer is to be kept on the host."""
    assert ranks(2).run(placed) == [("cpu", [3, 4], 12.0), ("cpu", [2, 4], 8.0)]


# --- what looks at weights while a model is set up -------------------------------------------------------------------


def taken_over(rank: int, folder: str, is_sharded: bool) -> tuple[list[str], str, dict[str, str], torch.Tensor]:
    """Parts of a model that liger runs, tensors that are recomputed, modules that are left alone; and losses."""
    kernels = SimpleNamespace(
        LigerSiLUMulFunction=SimpleNamespace(apply=lambda a, b: torch.nn.functional.silu(a) * b),
        LigerGELUMulFunction=SimpleNamespace(apply=lambda a, b: torch.nn.functional.gelu(a, approximate="tanh") * b),
        LigerRopeFunction=SimpleNamespace(apply=lambda q, k, cos, sin, ids, dim: apply_rotary_pos_emb(q, k, cos, sin)),
    )
    with (
        mock.patch.object(liger, "check_liger", lambda setting, *_: setting is not False),
        mock.patch.dict(sys.modules, {"liger_kernel": kernels, "liger_kernel.ops": kernels}),
    ):
        base = base_of(folder, Case(liger=True), is_sharded)
    training = Training(base, [{"r": 4}])
    words, left = add_recompute(base.model, base.storage.each)
    return base.liger, words, left, training.microbatch(rank, 0)


def test_norms_and_gates_are_looked_at_while_their_weights_are_here(
    folder: Callable[..., str], ranks: Callable[[int], Ranks]
) -> None:
    whole, parts = (ranks(2).run(taken_over, folder("llama"), is_sharded) for is_sharded in (False, True))
    for (*want, losses), (*got, own) in zip(whole, parts, strict=True):
        assert got == want and torch.equal(own, losses)
        assert (
            want[0] == [f"{2 * LAYERS + 1} LlamaRMSNorm", f"{LAYERS} LlamaAttention", f"{LAYERS} LlamaMLP"] or want[0]
        )
        assert want[1].startswith(f"{2 * LAYERS + 1} norms and {LAYERS} gated products") and want[2] == {}


def test_there_are_no_graphs_of_layers_that_are_gathered() -> None:
    storage = SimpleNamespace(is_whole=False, can_record=False)
    base: Any = SimpleNamespace(device=torch.device("cuda"), form=None, storage=storage)
    run: Any = SimpleNamespace(dtype="bfloat16", gradient_checkpointing=False)
    assert "in parts on several processes" in str(why_no_graphs(run, base, []))


def test_there_are_graphs_of_layers_that_are_cut() -> None:
    storage, model = Slices(can_record=True), tiny_model("llama")
    prepare_model(model, False)
    base: Any = SimpleNamespace(
        device=torch.device("cuda"), form=None, storage=storage, fused_loss=True, modality=None, model=model
    )
    run: Any = SimpleNamespace(
        dtype="bfloat16", gradient_checkpointing=False, cuda_graphs="auto", offload_embedding=False
    )
    assert why_no_graphs(run, base, []) is None


# --- gathers ---------------------------------------------------------------------------------------------------------


def gathers(run: Callable[[], Any]) -> int:
    """How many groups of weights are gathered while something runs."""
    with CommDebugMode() as counted:
        run()
    return int(sum(number for name, number in counted.get_comm_counts().items() if "allgather" in str(name)))


TOP = {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [2]}
MIDDLE = {"r": 2, "use_dora": True, "target_modules": ["v_proj"], "layers_to_transform": [1]}


def counted_gathers(rank: int, folder: str, case: Case, reach: bool) -> list[list[int]]:
    """Of microbatches of the job on layer 2, of that on layer 1 and of nobody; then without a gradient."""
    if not reach:
        Shards.adapted, before = lambda self, paths: None, Shards.adapted  # type: ignore[method-assign, assignment]
    try:
        training = Training(base_of(folder, case, True), [TOP, MIDDLE])
    finally:
        if not reach:
            Shards.adapted = before  # type: ignore[method-assign]
    training.microbatch(0, 0)  # from here on all are alike
    own = [[part for part in training.samples(0, 1) if part.adapter == owner] for owner in (0, 1)]
    run = [lambda own=own: sharded_step(training, own) for own in own]
    trained = [gathers(one) for one in run] + ([gathers(lambda: training.keep_step(True))] if reach else [])
    held = [gathers(lambda: training.executor.evaluate(own[0])), gathers(lambda: training.keep_step(False))]
    return [trained, held]


def sharded_step(training: Training, samples: list[Any]) -> None:
    training.executor.backward(training.executor.forward(samples))


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.soak), "gemma2"])
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_microbatches_of_any_job_and_of_nobody_gather_alike(
    family: str, checkpointing: bool, folder: Callable[..., str], ranks: Callable[[int], Ranks]
) -> None:
    """All layers in the forward; in the backward those from the first adapter of any job on, layer 1 here, and one ahead; and
    once all else."""
    case = Case(checkpointing=checkpointing)
    of_one = LAYERS + LAYERS + 1
    assert ranks(2).run(counted_gathers, folder(family), case, True) == [[[of_one] * 3, [LAYERS + 1, LAYERS]]] * 2
    if not checkpointing:  # for which transformers gives the embeddings a gradient anyway
        (trained, _), _ = ranks(2).run(counted_gathers, folder(family), case, False)
        assert trained == [of_one - 1, of_one], "without the hook a job gathers what it needs itself"


def counted_norms(rank: int, folder: str, case: Case, dense: bool) -> tuple[int, list[int], int]:
    """DoRA layers, norms computed by microbatch and evaluation of three steps, and gathers of the second step's first."""
    if dense:
        Shards.frozen, before = lambda self, weight: Dense(weight), Shards.frozen  # type: ignore[method-assign]
    computed = 0
    own = norms.row_norms

    def row_norms(problems: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        computed += len(problems)
        return own(problems, *args, **kwargs)

    norms.row_norms = row_norms  # type: ignore[assignment]
    try:
        training = Training(base_of(folder, case, True), case.configs())
        layers = sum(name.endswith("magnitude") for a in training.adapters for name in a.named_parameters())
        counts, gathered = [computed], 0
        for step in range(STEPS):
            for run in (
                lambda step=step: training.microbatch(rank, 2 * step),
                lambda step=step: training.microbatch(rank, 2 * step + 1),
                lambda: training.executor.evaluate(training.samples(rank, 9)),
            ):  # fmt: skip
                computed = 0
                if len(counts) == 4:
                    gathered = gathers(run)
                else:
                    run()
                counts.append(computed)
            training.step()
    finally:
        norms.row_norms = own
        if dense:
            Shards.frozen = before  # type: ignore[method-assign]
    return layers, counts, gathered


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.soak), True])
def test_norms_are_computed_once_a_step_while_their_layer_runs(
    checkpointing: bool, folder: Callable[..., str], ranks: Callable[[int], Ranks]
) -> None:
    """No layer is gathered for them, and they stand though the weights lie elsewhere after every gather."""
    case = Case("dora", 0.2, adapters=3, checkpointing=checkpointing)
    for layers, counts, gathered in ranks(2).run(counted_norms, folder("llama"), case, False):
        assert counts == [layers] + [layers, 0, 0] * STEPS and layers > 7 * LAYERS
        assert gathered == 2 * LAYERS, "what is not of a layer is still here after an evaluation"
    if checkpointing:
        layers, counts, _ = ranks(2).run(counted_norms, folder("llama"), case, True)[0]
        assert sum(counts) > layers * (1 + STEPS), "known by where they lie, they are computed anew"


def in_inference_mode(rank: int, folder: str, case: Case) -> bool:
    """Whether evaluations in inference mode leave training as it is."""
    plain, evaluated = (Training(base_of(folder, case, True), case.configs()) for _ in range(2))
    sums = []
    for training in (plain, evaluated):
        own = []
        for step in range(STEPS):
            own.append(training.microbatch(rank, step))
            if training is evaluated:
                with torch.inference_mode():
                    training.executor.evaluate(training.samples(rank, 9))
            own += training.step()
        sums.append(own)
    return all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_an_evaluation_in_inference_mode_leaves_training_as_it_is(
    folder: Callable[..., str], ranks: Callable[[int], Ranks]
) -> None:
    case = Case("dora", checkpointing=True)
    assert ranks(2).run(in_inference_mode, folder("llama"), case) == [True, True]
