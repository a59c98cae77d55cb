"""adapters.norms: every way of changing W, A or B gives a norm of the new values; nothing else computes it again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import tiny_model
from exact_norms import checked
from peft import LoraConfig
from stored_weights import Bytes
from torch import nn

from packlora.adapters import norm_operands
from packlora.adapters import norms as module
from packlora.adapters.attach import attach
from packlora.adapters.norms import NormHandle, RowNorms
from packlora.adapters.spec import resolve
from packlora.base.packing import prepare_model
from packlora.ops.row_norm import row_norm as ops


class Layer(nn.Module):
    """A linear layer with one adapter, that asks for its norm as a layer does."""

    def __init__(self, norms: RowNorms, version_counted: bool, N: int = 20, K: int = 24, r: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(K, N, bias=False).half().requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(r, K) * 0.2), nn.Parameter(torch.randn(N, r) * 0.2)
        self.scaling = 1.5
        self.handle = NormHandle(norms, self.base.weight, self.A, self.B, self.scaling, version_counted)

    def norm(self) -> torch.Tensor:
        return self.handle.point(self.base.weight, self.A, self.B, self.scaling).get()

    def exact(self) -> torch.Tensor:
        A, B = self.A.detach().double(), self.B.detach().double()
        return (self.base.weight.double() + self.scaling * B @ A).norm(dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.base.weight.T.float() / self.norm() + x @ self.A.T @ self.B.T


def right(layer: Layer) -> bool:
    return bool(((layer.norm().double() - layer.exact()).abs() <= 1e-6 * layer.exact()).all())


@pytest.fixture(params=["copies", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the data of handles that are not version-counted are checked; "device" is the way of a GPU, in the interpreter."""
    if request.param == "device":
        pytest.importorskip("triton")
        monkeypatch.setattr(ops, "KERNELS_ON_CPU", True)
    return str(request.param)


# --- ways of changing what a norm depends on -----------------------------------------------------------------------------


def optimizer_step(kind: Any, **settings: Any) -> Callable[[Layer], None]:
    def change(layer: Layer) -> None:
        layer.A.grad, layer.B.grad = torch.randn_like(layer.A), torch.randn_like(layer.B)
        optimizer = kind([layer.A, layer.B], lr=0.1, **settings)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return change


def add_in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.A.add_(0.1)


def one_element_in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.B[3, 1] += 0.5


def weight_in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.base.weight[2, 7] += 0.5


def weight_of_another_object(layer: Layer) -> None:
    layer.base.weight = nn.Parameter(torch.randn_like(layer.base.weight), requires_grad=False)


def weight_data_replaced(layer: Layer) -> None:
    layer.base.weight.data = layer.base.weight.data * 2


def scaling(layer: Layer) -> None:
    layer.scaling *= 2


def data_replaced(layer: Layer) -> None:
    layer.A.data = layer.A.data * 2


def data_replaced_twice_at_one_address(layer: Layer) -> None:
    """The second new storage may lie where the one that the norm was computed from was freed."""
    before = layer.A.data_ptr()
    shape = layer.A.shape
    layer.A.data = torch.empty(0)
    for _ in range(50):
        layer.A.data = torch.randn(shape)
        if layer.A.data_ptr() == before:
            return
        layer.A.data = torch.empty(0)
    layer.A.data = torch.randn(shape)


def new_parameter(layer: Layer) -> None:
    layer.A = nn.Parameter(layer.A.detach() * 2)


def load_state(assign: bool) -> Callable[[Layer], None]:
    def change(layer: Layer) -> None:
        state = {name: tensor * 1.5 for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, assign=assign)

    return change


def swapped(layer: Layer) -> None:
    torch.utils.swap_tensors(layer.A, nn.Parameter(torch.randn_like(layer.A)))


def new_rank(layer: Layer) -> None:
    layer.A, layer.B = nn.Parameter(torch.randn(7, 24) * 0.2), nn.Parameter(torch.randn(20, 7) * 0.2)


def new_rank_through_data(layer: Layer) -> None:
    layer.A.data, layer.B.data = torch.randn(7, 24) * 0.2, torch.randn(20, 7) * 0.2


def moved_and_back(layer: Layer) -> None:
    layer.to(torch.float64)
    with torch.no_grad():
        layer.A.mul_(2)
    layer.A.data, layer.B.data = layer.A.data.float(), layer.B.data.float()
    layer.base.half()


def resharded(layer: Layer) -> None:
    """FSDP2: the storage is freed and filled anew, same object, same storage, version counter put back."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layer.A):
        new = torch.randn_like(layer.A)
        storage = layer.A.untyped_storage()
        size = storage.size()
        storage.resize_(0)
        storage.resize_(size)
        layer.A.copy_(new)


def data_copy(layer: Layer) -> None:
    layer.A.data.copy_(torch.randn_like(layer.A))


def data_of_one_element(layer: Layer) -> None:
    layer.B.data[11, 2] += 1e-2


def data_in_other_order(layer: Layer) -> None:
    layer.B.data.copy_(layer.B.data.flip(0))


def detached(layer: Layer) -> None:
    layer.A.detach()[1].zero_()  # counts versions: detach() shares the counter; the same through .data does not


def numpy_view(layer: Layer) -> None:
    layer.A.detach().numpy()[2, 3] += 5.0


def merged_and_unmerged(layer: Layer) -> None:
    """As PEFT does it, through .data; in 16 bits W is not what it was."""
    delta = (20 * torch.randn(20, 24)).half()
    layer.base.weight.data += delta
    layer.base.weight.data -= delta


def weight_rows_through_data(layer: Layer) -> None:
    layer.base.weight.data[5].mul_(1.5)


def without_version(layer: Layer) -> None:
    with torch.autograd._unsafe_preserve_version_counter(layer.B), torch.no_grad():
        layer.B.mul_(1.1)


SEEN_ON_THE_HOST = {
    "adamw foreach": optimizer_step(torch.optim.AdamW, foreach=True),
    "adamw fused": optimizer_step(torch.optim.AdamW, fused=True),
    "adamw for loop": optimizer_step(torch.optim.AdamW, foreach=False),
    "sgd": optimizer_step(torch.optim.SGD, momentum=0.9),
    "sgd fused": optimizer_step(torch.optim.SGD, fused=True),
    "add_": add_in_place,
    "one element": one_element_in_place,
    "weight in place": weight_in_place,
    "another weight": weight_of_another_object,
    "weight.data =": weight_data_replaced,
    "scaling": scaling,
    ".data =": data_replaced,
    ".data = twice": data_replaced_twice_at_one_address,
    "new parameter": new_parameter,
    "load_state_dict": load_state(False),
    "load_state_dict assign": load_state(True),
    "swap_tensors": swapped,
    "another rank": new_rank,
    "another rank by .data =": new_rank_through_data,
    "to float64 and back": moved_and_back,
    "detach()": detached,
}
SEEN_IN_THE_DATA = {
    "resharded": resharded,
    ".data.copy_": data_copy,
    ".data of one element": data_of_one_element,
    ".data in another order": data_in_other_order,
    "numpy view": numpy_view,
    "version counter kept": without_version,
    "merge and unmerge": merged_and_unmerged,
    "rows of the weight by .data": weight_rows_through_data,
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("version_counted", "way"), [(False, "copies"), (False, "device"), (True, "copies")], indirect=["way"]
)
@pytest.mark.parametrize("change", SEEN_ON_THE_HOST)
def test_no_stale_norm_after_a_change_that_the_host_sees(change: str, version_counted: bool, way: str) -> None:
    norms = RowNorms()
    layers = [Layer(norms, version_counted) for _ in range(2)]
    assert all(map(right, layers))
    before = layers[1].exact()
    SEEN_ON_THE_HOST[change](layers[1])
    assert not torch.equal(layers[1].exact(), before), "the change matters"
    assert all(map(right, layers))


@pytest.mark.sampled
@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("change", SEEN_IN_THE_DATA)
def test_no_stale_norm_after_a_change_that_only_the_data_show(change: str, first: int, way: str) -> None:
    """For handles that are not version-counted, asked one by one and in a window."""
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(2)]
    with checked(norms):
        assert all(map(right, layers))
    for one_by_one in (True, False):
        before = layers[1].exact()
        SEEN_IN_THE_DATA[change](layers[1])
        assert not torch.equal(layers[1].exact(), before), "the change matters"
        if one_by_one:
            assert right(layers[first])
        with checked(norms):
            assert all(map(right, layers))


@pytest.mark.parametrize("change", [change for change in SEEN_IN_THE_DATA if change != "resharded"])
def test_invalidate_is_what_version_counted_handles_need_after_such_a_change(change: str) -> None:
    norms = RowNorms()
    layer = Layer(norms, True)
    old = layer.norm()
    SEEN_IN_THE_DATA[change](layer)
    assert layer.norm() is old, "what is not promised to a version-counted handle"
    norms.invalidate()
    assert right(layer)


def test_the_data_check_misses_elements_of_the_weight_that_it_does_not_look_at_and_invalidate_helps(way: str) -> None:
    norms = RowNorms()
    layer = Layer(norms, False, K=4000)
    assert right(layer)
    layer.base.weight.data[0, 3999] += 30.0
    assert not right(layer)
    norms.invalidate()
    assert right(layer)


def test_a_check_that_fails_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = RowNorms()
    layer = Layer(norms, False)
    assert right(layer)
    data_copy(layer)
    with checked(norms):
        with monkeypatch.context() as broken:
            broken.setattr(module, "row_norms", lambda problems: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                layer.norm()
        assert right(layer)
    with pytest.raises(KeyError), checked(norms):
        raise KeyError
    data_copy(layer)
    assert right(layer)


@pytest.mark.parametrize("window", [True, False])
def test_a_check_on_a_device_that_fails_is_not_taken_for_one(window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums were those of the new data, and its norms those of the old."""
    pytest.importorskip("triton")
    from packlora.ops.row_norm.triton_path import Batch

    monkeypatch.setattr(ops, "KERNELS_ON_CPU", True)
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(2)]
    around = checked if window else nullcontext
    for _ in range(2):
        with around(norms):
            assert all(map(right, layers))
        data_copy(layers[1])
        with monkeypatch.context() as broken, around(norms):
            broken.setattr(Batch, "run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                layers[1].norm()
    with around(norms):
        assert all(map(right, layers))


def test_a_handle_that_a_window_did_not_check_at_its_begin_is_checked_when_it_is_asked(way: str) -> None:
    """Of an adapter that was not active for a while, and of a layer whose operands are gathered just before it runs."""
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(3)]
    for _ in range(2):
        with checked(norms):
            assert all(map(right, layers))
    for _ in range(2):
        with checked(norms):
            assert right(layers[0])
            assert right(layers[1])
    data_copy(layers[2])
    storage, data = layers[1].A.untyped_storage(), torch.randn_like(layers[1].A)
    size = storage.size()
    storage.resize_(0)
    with checked(norms):
        assert right(layers[0])
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layers[1].A):
            storage.resize_(size)
            layers[1].A.copy_(data)
        assert right(layers[1])
        assert right(layers[2])


# --- in a graph that is being captured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("version_counted", [False, True])
def test_nothing_kept_is_used_in_a_graph_and_nothing_of_a_graph_is_kept(
    version_counted: bool, window: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm that was computed before would be the same at every replay. Kept ones are spoiled, so that they would show."""
    norms = RowNorms()
    layers = [Layer(norms, version_counted) for _ in range(2)]
    for _ in range(2):
        with checked(norms):
            assert all(map(right, layers))
    for change in (None, data_copy, SEEN_ON_THE_HOST["adamw fused"], weight_in_place):
        if change is not None:
            change(layers[1])
        kept = [layer.handle._kept.norm_N for layer in layers]
        values = [norm_N.clone() for norm_N in kept]
        for norm_N in kept:
            norm_N.fill_(5.0)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_capturing", lambda: True)
            if window:
                norms.open()
            captured = [layer.norm() for layer in layers]
            assert all(map(right, layers))
            if window:
                norms.close()
        for norm_N, value, layer in zip(kept, values, layers, strict=True):
            assert layer.handle._kept.norm_N is norm_N, "what a graph computes is not kept"
            norm_N.copy_(value)
        for norm_N in captured:
            norm_N.fill_(7.0)
        if version_counted and change is data_copy:
            norms.invalidate()
        assert all(map(right, layers))
        with checked(norms):
            assert all(map(right, layers))


def test_the_check_of_a_window_is_in_the_graph_once_for_all(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(3)]
    with checked(norms):
        assert all(map(right, layers))
    SEEN_ON_THE_HOST["adamw fused"](layers[1])
    looks.clear()
    monkeypatch.setattr(module, "_capturing", lambda: True)
    for forward in range(1, 3):
        with checked(norms):
            assert all(map(right, layers))
        assert looks == [3] * forward
        data_copy(layers[0])
    assert right(layers[0]), "outside of a window a handle computes its own"
    assert list(norms._captured.values()) == norms._together.checks, "the graph's buffers live on"


def test_a_frozen_weight_that_changed_before_the_capture_is_not_measured_in_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """||W||^2 computed in a capture would be kept, and is not there before the first replay."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "KERNELS_ON_CPU", True)
    norms = RowNorms()
    layer = Layer(norms, False)
    assert right(layer)
    assert right(layer)
    weight_in_place(layer)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_capturing", lambda: True)
        patch.setattr(norm_operands, "squared_row_norm", lambda weight: 1 / 0)
        assert right(layer)
    assert right(layer)


# --- kept --------------------------------------------------------------------------------------------------------------


def test_a_step_of_an_optimizer_over_copies_of_the_parameters_is_noticed() -> None:
    """Sharded optimizers hold flat tensors of their own and write the parameters back unseen."""
    norms = RowNorms()
    layer = Layer(norms, False)
    kept = layer.handle.get()
    flat = nn.Parameter(torch.zeros(3))
    flat.grad = torch.ones(3)
    torch.optim.SGD([flat], lr=0.1, fused=True).step()
    assert not layer.handle._kept.seen.stands(layer.handle)
    assert torch.equal(layer.norm(), kept)


def test_on_the_device_only_modules_that_changed_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of the others come out of what was kept: spoiled there, they come out spoiled."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "KERNELS_ON_CPU", True)
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(3)]
    with checked(norms):
        assert all(map(right, layers))
    (check,) = norms._together.checks
    check.kept.fill_(7.0)
    data_copy(layers[1])
    with checked(norms):
        assert right(layers[1])
        assert all(float(layer.norm().min()) == float(layer.norm().max()) == 7.0 for layer in (layers[0], layers[2]))


def test_a_norm_that_is_in_a_graph_is_not_written_to(way: str) -> None:
    """dm = dg / w of a forward before the step needs the w of that forward."""
    norms = RowNorms()
    layer = Layer(norms, False)
    m = torch.rand(20, requires_grad=True)
    w = layer.norm()
    want = (1 / w).clone()
    loss = (m / w).sum()
    add_in_place(layer)
    assert right(layer)
    loss.backward()
    assert torch.equal(m.grad, want)


# --- what the operands may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version_counted", [False, True])
def test_weights_that_are_no_tensors_are_watched_through_their_key(version_counted: bool) -> None:
    weight = Bytes(torch.randn(20, 24))
    layer = Layer(RowNorms(), version_counted)
    handle = layer.handle.point(weight, layer.A, layer.B, 1.0)

    def right() -> bool:
        exact = (weight.rows(0, 20).double() + layer.B.detach().double() @ layer.A.detach().double()).norm(dim=1)
        return torch.allclose(handle.get().double(), exact, rtol=1e-6)

    assert right()
    kept = handle.get()
    assert handle.get() is kept
    weight.codes_NK[4] = 5
    assert right()
    add_in_place(layer)
    assert right()
    if not version_counted:
        data_copy(layer)
        assert right()
    kept = handle.get()
    weight.key_is_known = False
    assert handle.get() is not kept, "where versions are not counted nothing stands"


def test_operands_that_are_not_whole_are_refused_and_left_out_of_batches() -> None:
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(2)]
    data = layers[0].A.detach().clone()
    layers[0].A.untyped_storage().resize_(0)
    assert right(layers[1])
    with checked(norms), pytest.raises(RuntimeError, match=r"needs its operands whole: the storage of A is freed"):
        layers[0].norm()
    layers[0].A.data = data
    assert right(layers[0])

    class Sharded(torch.Tensor):
        pass

    del layers[0].B
    layers[0].B = torch.randn(20, 4).as_subclass(Sharded)
    with pytest.raises(RuntimeError, match=r"B is a Sharded, not a torch.Tensor"):
        layers[0].norm()


# --- lifetime ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version_counted", [False, True])
def test_handles_die_with_their_layers_without_the_garbage_collector(version_counted: bool, way: str) -> None:
    norms = RowNorms()
    layer, other = Layer(norms, version_counted), Layer(norms, version_counted)
    with checked(norms):
        assert right(layer)
        assert right(other)
    watch = [weakref.ref(layer.handle), weakref.ref(layer.A)]
    gc.disable()
    try:
        del layer
        assert [ref() for ref in watch] == [None, None]
        assert len(norms._handles) == 1
        alive = weakref.ref(norms)
        del norms, other
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_models_can_be_copied_and_the_copies_have_norms_of_their_own(how: str, way: str) -> None:
    norms = RowNorms()
    model = nn.ModuleList(Layer(norms, False) for _ in range(2))
    assert all(map(right, model))
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert twin[0].handle.norms is twin[1].handle.norms is not norms
    assert twin[0].handle.A is twin[0].A
    data_copy(twin[0])
    assert all(map(right, [*twin, *model]))
    assert sorted(map(id, twin[0].handle.norms._handles.values())) == sorted(id(layer.handle) for layer in twin)


def test_adapters_that_are_put_onto_a_model_have_each_norm_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First values are written together: a write to a job's parameter moves the version of all of them."""
    computed, own = [], module.row_norms
    monkeypatch.setattr(module, "row_norms", lambda problems: computed.extend(problems) or own(problems))
    model = tiny_model("llama", num_hidden_layers=3)
    prepare_model(model, False)
    peft = LoraConfig(r=2, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    _, adapters = attach(model, {name: resolve(peft, model, name) for name in ("a", "b")}, 0)
    assert len(computed) == 2 * 3 * 7
    for path, weights in adapters[1].weights.items():
        assert weights.magnitude is not None
        norm_N = model.get_submodule(path).weight.norm(dim=1)
        assert torch.allclose(weights.magnitude, norm_N, rtol=1e-6)


def test_a_new_norm_looks_at_no_other_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else making the adapters of a model of n layers takes n^2 / 2 looks."""
    looks: list[object] = []
    stands = norm_operands.Seen.stands
    monkeypatch.setattr(norm_operands.Seen, "stands", lambda seen, handle: looks.append(handle) or stands(seen, handle))
    norms, layers = RowNorms(), list[Layer]()
    for _ in range(8):
        layers.append(Layer(norms, True))
        assert right(layers[-1])
    assert len(looks) <= 8
    with torch.no_grad():
        for layer in layers:
            layer.B.mul_(2)
    assert all(map(right, [Layer(norms, True), *layers]))
