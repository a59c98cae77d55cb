"""packlora.accelerate on PEFT's adapters of experts (target_parameters): PEFT's numbers, files and life cycle, and nothing of
the size of the experts' weights."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expert_models import in_float64, tiny_experts
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

import packlora
from packlora.adapters import expert_layout

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
OUTERMOST, INNER = (
    "base_model.model.model.layers.0.mlp.experts",
    "base_model.model.model.layers.0.mlp.experts.base_layer",
)


def config(**settings: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 3, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": EXPERTS} | settings
    )


def adapted(family: str = "qwen3_moe", dtype: torch.dtype = torch.float64, depth: int = 2, **settings: Any) -> Any:
    """A tiny model in train mode with adapters that matter."""
    base = tiny_experts(family, dtype, num_hidden_layers=depth)
    return fill(get_peft_model(base, config(**settings), autocast_adapter_dtype=False)).train()


def fill(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def outcome(model: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of the embedded tokens and of all parameters that got one."""
    model.zero_grad()
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    (logits.square() * torch.arange(1, IDS.shape[1] + 1)[:, None]).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach(), "x": x.grad, **grads}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bound: float = 1e-10) -> None:
    assert got.keys() == want.keys() and len(want) > 2
    for name, value in want.items():
        assert float((got[name] - value).norm()) <= bound * float(value.norm()), name


def of_experts(report: packlora.Report) -> dict[str, Any]:
    """What became of the calls of ParamWrappers."""
    kinds = {module.path: module.kind for module in report.modules}
    return {path: calls for path, calls in report.served().items() if kinds[path] == "lora.ParamWrapper"}


# --- the same numbers --------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"rank_pattern": {"experts.down_proj": 5}}),
    "qwen3_moe": ("qwen3_moe", {"use_rslora": True, "target_modules": "all-linear"}),
    "olmoe, one weight": ("olmoe", {"target_parameters": EXPERTS[1:]}),
    "gpt_oss, transposed, trained biases, a router with one": (
        "gpt_oss", {"target_parameters": [*EXPERTS, "router.weight"], "bias": "all"},
    ),
    "llama4, rows that lie by expert, A and B in each other's place": (
        "llama4", {"target_parameters": [*EXPERTS, "router.weight"]},
    ),
    "qwen3_next, linear attention": ("qwen3_next", {"target_modules": "all-linear", "target_parameters": EXPERTS[1:]}),
    "deepseek_v3, the other weight, a router of its own": (
        "deepseek_v3", {"target_parameters": [EXPERTS[0], "gate.weight"], "target_modules": ["o_proj"]},
    ),
    "qwen2_moe, a router beside linear layers that read the same": (
        "qwen2_moe", {
            "target_modules": ["shared_expert_gate", "shared_expert.gate_proj"],
            "target_parameters": ["gate.weight", "q_proj.weight", "k_proj.weight", *EXPERTS],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_are_peft_s_in_float64(case: str, training: bool) -> None:
    family, settings = CASES[case]
    with in_float64():
        model = adapted(family, **settings).train(training)
        want = outcome(model)
        report = packlora.accelerate(model)
        assert_same(outcome(model), want)
        assert report.accelerated == len(report.modules)
        assert not [path for group in report.groups for path in group if path.endswith(("mlp.gate", "mlp.router"))]
        assert {(calls.served, *calls.left) for calls in report.served().values()} == {(1,)}
        packlora.restore(model)
        assert_same(outcome(model), want, 0.0)


class Largest(TorchDispatchMode):
    """The most elements that an operation made, without those that only look at what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        there = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in there:
                self.elements = max(self.elements, one.numel())
        return out


def test_nothing_of_the_size_of_the_experts_weights_is_made() -> None:
    model = adapted()
    weight = model.get_submodule(INNER).base_layer.gate_up_proj.numel()

    def largest() -> int:
        with Largest() as seen:
            outcome(model)
        return seen.elements

    assert largest() >= weight
    packlora.accelerate(model)
    assert largest() < weight


# --- the life of a model -----------------------------------------------------------------------------------------------


def twins(**settings: Any) -> tuple[Any, Any]:
    """A model with two adapters, accelerated, and the same in PEFT's hands."""
    model = adapted(**settings)
    model.add_adapter("other", config(r=2, lora_alpha=3, **settings))
    fill(model)
    twin = copy.deepcopy(model)
    packlora.accelerate(model)
    return model, twin


def files_of(folder: Path) -> dict[str, Any]:
    """Their bytes; of the configuration its values, for PEFT writes sets of names in any order."""
    found: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir()}
    config = json.loads(found["adapter_config.json"])
    found["adapter_config.json"] = {k: sorted(v) if isinstance(v, list) else v for k, v in config.items()}
    return found


def test_a_model_lives_as_it_does_in_peft_s_hands(tmp_path: Path) -> None:
    """Adapters are switched, activated together, disabled, merged, unmerged, deleted, saved and loaded."""

    def same(*models: Any) -> None:
        got, want = map(outcome, models)
        assert_same(got, want)

    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, twin = twins()
        same(model, twin)
        for one in (model, twin):
            one.set_adapter("other")
        same(model, twin)
        for one in (model, twin):
            one.base_model.set_adapter(["default", "other"])
        same(model, twin)
        for one in (model, twin):
            one.set_adapter("default")
        with model.disable_adapter(), twin.disable_adapter():
            assert torch.equal(model(IDS).logits, twin(IDS).logits)
        for one in (model, twin):
            one.get_submodule(OUTERMOST).merge()  # of one weight alone: the other's adapter is still computed
        same(model, twin)
        for one in (model, twin):
            one.get_submodule(OUTERMOST).unmerge()
            one.merge_adapter()
        assert torch.equal(model(IDS).logits, twin(IDS).logits)
        for one in (model, twin):
            one.unmerge_adapter()
            one.delete_adapter("other")
        same(model, twin)
        assert list(model.state_dict()) == list(twin.state_dict())
        for one, name in ((model, "ours"), (twin, "theirs")):
            one.save_pretrained(tmp_path / name)
        assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
        loaded = PeftModel.from_pretrained(tiny_experts("qwen3_moe"), tmp_path / "ours", is_trainable=True).train()
        packlora.accelerate(loaded)
        same(loaded, twin)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            same(copied, twin)
            assert type(copied.get_submodule(OUTERMOST).forward.__self__).__name__ == "ExpertsForward"
        got, want = model.merge_and_unload(), twin.merge_and_unload()
        assert torch.equal(got(IDS).logits, want(IDS).logits)
        assert not [
            name for module in got.modules() for name in vars(module) if "packlora" in name or name == "forward"
        ]


def test_calls_are_counted_weight_by_weight() -> None:
    with in_float64():
        model = adapted()
        model.add_adapter("other", config())
        report = packlora.accelerate(model)
        outcome(model)
        model.get_submodule(OUTERMOST).merge()
        outcome(model)
        model.get_submodule(OUTERMOST).unmerge()
        with model.disable_adapter():
            model(IDS)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.base_model.set_adapter(["default", "other"])
            outcome(model)
    served, disabled, several = (
        report.served(),
        "its adapters are disabled",
        "several adapters are active: default, other",
    )
    assert served[INNER].served == 2 and served[OUTERMOST].served == 1
    assert served[INNER].left == {disabled: 1, several: 1}
    assert served[OUTERMOST].left == {"its adapters are merged into the base weights": 1, disabled: 1, several: 1}
    assert [several in str(one.message) for one in seen if "packlora" in str(one.message)] == [True]


# --- beside other tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_have_the_same_gradients(reentrant: bool) -> None:
    with in_float64():
        model = adapted(target_modules="all-linear")
        want = outcome(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        report = packlora.accelerate(model)
        assert_same(outcome(model), want)
    assert {calls.served for calls in of_experts(report).values()} == {2}


def test_compiled_experts_have_the_same_gradients_and_are_computed_here() -> None:
    model = adapted(depth=1, target_modules=[])
    mlp = model.get_submodule(OUTERMOST.rpartition(".")[0])
    x = torch.randn(1, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]

    def run(call: Any) -> list[torch.Tensor]:
        y = call(x)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *trained])]

    want = run(mlp)
    report = packlora.accelerate(model)
    torch._dynamo.reset()
    got = run(torch.compile(mlp, backend="eager"))
    assert len(got) == 6
    assert all(torch.allclose(one, two, rtol=1e-9) for one, two in zip(got, want, strict=True))
    assert {(calls.served, *calls.left) for calls in of_experts(report).values()} == {(1,)}


@pytest.mark.parametrize(("base", "autocast"), [(torch.bfloat16, False), (torch.float32, True)])
def test_in_16_bits_errors_are_within_twice_those_of_peft(base: torch.dtype, autocast: bool) -> None:
    """One module of experts, with routing that does not depend on rounding. Dtypes are PEFT's too."""
    model = adapted(dtype=base)
    peft = model.get_submodule(OUTERMOST)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 64, generator=generator).to(base)
    index = torch.rand(40, 6, generator=generator).topk(2).indices
    weights = torch.rand(40, 2, generator=generator).to(base)

    def run(experts: Any, dtype: torch.dtype, cast: bool) -> dict[str, torch.Tensor]:
        rows, chosen = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
        trained = {name: p for name, p in experts.named_parameters() if p.requires_grad}
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = experts(rows, index, chosen)
        grads = torch.autograd.grad(y.float().square().sum(), [rows, chosen, *trained.values()])
        return dict(zip(["y", "x", "weights", *trained], [y.detach(), *grads], strict=True))

    exact = run(copy.deepcopy(peft).double(), torch.float64, False)
    theirs = run(peft, base, autocast)
    packlora.accelerate(model)
    ours = run(peft, base, autocast)
    assert {name: one.dtype for name, one in ours.items()} == {name: one.dtype for name, one in theirs.items()}
    errors = [
        sum(float((one[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact)
        for one in (ours, theirs)
    ]
    assert 0 < errors[0] <= 2 * errors[1]


def test_a_router_keeps_what_is_under_the_last_bit_of_bfloat16() -> None:
    """PEFT adds it to the weight, where most of it is gone. The share of the adapter's part that is in the logits."""
    path = "base_model.model.model.layers.0.mlp.gate"
    model = adapted(dtype=torch.bfloat16, target_parameters=["gate.weight"], target_modules=[])
    wrapper: Any = model.get_submodule(path)
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    A, B = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    weight = wrapper.base_layer.weight.detach().double()
    with torch.no_grad():
        delta = B.double() @ A.double() * wrapper.scaling["default"]
        B.mul_(2**-12 * float(weight.norm() / delta.norm()))
        low = x.double() @ (B.double() @ A.double() * wrapper.scaling["default"]).T

    def share() -> float:
        with torch.no_grad():
            logits = wrapper(x)[0].double()
        # what the frozen router gives of x is taken from its exact logits
        return float(((logits - x.double() @ weight.T) * low).sum() / low.square().sum())

    assert share() < 0.6
    packlora.accelerate(model)
    assert 0.7 < share() < 1.3


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_router_whose_logits_are_recorded_is_computed_here(family: str) -> None:
    """transformers records them by hooks that it puts on routers at the first forward that asks for them, and leaves there."""
    with in_float64():
        name = "gate" if family == "mixtral" else "router"
        model = adapted(family, target_parameters=[*EXPERTS, f"{name}.weight"], target_modules=[])
        ids = torch.arange(5, 25)[None]

        def run() -> list[torch.Tensor]:
            out = model(input_ids=ids, labels=ids, output_router_logits=True)
            trained = [p for p in model.parameters() if p.requires_grad]
            return [out.loss, out.aux_loss, *out.router_logits, *torch.autograd.grad(out.loss, trained)]

        want = run()
        report = packlora.accelerate(model)
        got = run()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    routers = [calls for path, calls in report.served().items() if path.endswith(f"mlp.{name}")]
    assert routers and all((calls.served, calls.left) == (1, {}) for calls in routers)


# --- what stays PEFT's -------------------------------------------------------------------------------------------------


def hooked(model: Any) -> None:
    model.get_submodule(INNER).base_layer.register_forward_hook(lambda *_: None)


def inner_hooked(model: Any) -> None:
    model.get_submodule(INNER).register_forward_hook(lambda *_: None)


def trained(model: Any) -> None:
    model.get_submodule(INNER).base_layer.down_proj.requires_grad_(True)


def replaced(model: Any) -> None:
    wrapper = model.get_submodule(OUTERMOST)
    wrapper.forward = wrapper.forward


def another_function(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS.register("of_a_user", batched_mm_experts_forward)
    model.base_model.model.set_experts_implementation("of_a_user")


LEFT: dict[Callable[[Any], None], str] = {
    hooked: "its experts has hooks or a replaced forward",
    inner_hooked: "its base layer has hooks or a replaced forward",
    trained: "the weights of its experts are trained too",
    another_function: "its experts are computed by of_a_user",
    replaced: "its forward was replaced by other code",
}


@pytest.mark.parametrize("change", LEFT, ids=lambda change: change.__name__)
def test_what_is_not_computed_here_is_peft_s_with_a_reason(change: Callable[[Any], None]) -> None:
    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted()
        change(model)
        want = outcome(model)
        report = packlora.accelerate(model)
        assert_same(outcome(model), want)
    assert LEFT[change] in f"{report} {[dict(calls.left) for calls in report.served().values()]}"
    assert not [path for path, calls in report.served().items() if path.startswith(OUTERMOST) and calls.served]


def test_experts_that_transformers_does_not_call_by_its_registry_are_peft_s() -> None:
    with mock.patch.object(expert_layout, "SCALED", ()):  # as those of a family that is not known
        model = adapted("llama4", target_modules=["q_proj"])
        want = outcome(model)
        report = packlora.accelerate(model)
        assert_same(outcome(model), want)
    reasons = {module.reason for module in report.modules if module.kind == "lora.ParamWrapper"}
    assert reasons == {"transformers does not call its experts through its registry of experts' functions"}


def test_the_weight_of_an_embedding_is_peft_s_with_a_reason() -> None:
    report = packlora.accelerate(adapted(target_parameters=["embed_tokens.weight"]))
    (reason,) = {module.reason for module in report.modules if module.kind == "lora.ParamWrapper"}
    assert reason is not None and reason.startswith("weight is that of an embedding, whose whole W + s B A PEFT makes")
