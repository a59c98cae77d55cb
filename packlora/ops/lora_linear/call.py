"""A call of the operator in two halves: `Call` is what is settled of it (plain numbers, places, tables on the device), made
once for all calls that are alike; `Operands` are the tensors of layers and adapters as products and kernels read them. x, the
dropout keys, S and gradients are the only tensors that are new with every call.

`Path` is how the steps of a call are computed: torch_path.py by torch's products, triton_path.py by the Triton kernels.

    down       S = s c (drop(x) A')
    up         y = g (x W' + S B') + bias
    magnitude  e = g d, and the sums over tokens that the gradients of magnitudes and biases are made of
    grads      dS = s c (e B), dB = e' S
    inputs     dx = e W + drop(dS A), dA = dS' drop(x)

drop() puts dropped elements to 0 and does not scale: the scaling s and the survivors' factor c = 1 / (1 - p) are in S and dS
and nowhere else, so any path of one step goes with any path of the others. g is 1 for LoRA and m / norm for DoRA; layers where
no adapter has a magnitude or a bias of its own have no scales: there e is d.

A DoRA segment under dropout whose base product is that of the dropped x (Segment.base_dropped, PEFT's semantics) is a LoRA
segment, and has

    y += (g - 1) (drop(x) c W' + S B'),    dx += drop((g - 1) d c W),    dS = s c g d B

added to it: two base products. (g - 1) is formed in g's dtype; the difference of rounded products would be nothing near g = 1.
S B' is scaled by g before it is added to anything: the rounding of a sum with it would count more the farther g is from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from packlora.ops.dropout import masked
from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.lora_linear.layout import Layout, Place
from packlora.ops.lora_linear.plan import Plan, Up
from packlora.ops.lora_linear.types import Segment

if TYPE_CHECKING:
    from packlora.ops.lora_linear.tables import GroupTables, SegmentTables


class Part(NamedTuple):
    """Share of one segment in a step: rows of tensors [T, ...] and columns of S, None where they are all; factor s c. Of one
    layer's: the number of its `Stack`, and of its block there."""

    segment: Segment
    rows: slice | None
    columns: slice | None
    factor: float
    stack: int = 0
    block: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The segment's rows."""
        return tensor if self.rows is None else tensor[self.rows]

    def of_S(self, S: torch.Tensor) -> torch.Tensor:
        """The segment's rows and columns of S, or dS. Views cost the host time."""
        if self.columns is None:
            return S if self.rows is None else S[self.rows]
        return S[self.segment.rows, self.columns]


class Stack(NamedTuple):
    """Segment whose adapter has a rank: its part over all layers, its parts by layer where these scale differently, and the
    number of columns of S of each layer, the rest at the end."""

    segment: Segment
    all_layers: Part
    by_layer: tuple[Part, ...]
    widths: tuple[int, ...]


class Slot(NamedTuple):
    """An operand that may get a gradient, of an adapter that owns tokens: where it stands among these, its layer, adapter and
    name, its place in the layout (None of a bias), which of the adapter's layers it is (Layout.a_blocks), and where it stands
    among the operands of all adapters (Prepared.flat)."""

    at: int
    layer: int
    number: int
    name: str
    place: Place | None
    block: int
    source: int


@dataclass(slots=True)
class Scales:
    """Scales of one layer: the scale g, the norm w and the bias of the outputs (None without any bias), each [adapters + 1, N]
    in float32 (float64 for float64). Row i belongs to the i-th of `numbers`, the last row to tokens without an adapter.

    numbers: of the group's adapters (Layout.numbers).
    sum_rows: int32 [2 adapters, 2], place of the adapter and row of every pair of sums over tokens, as sum_rows_kernel takes
        them.
    """

    g: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    sum_rows: torch.Tensor
    numbers: tuple[int, ...]
    g_rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    w_rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    bias_rows: Mapping[int, torch.Tensor | None] = field(default_factory=dict)
    """g, w and bias as views by adapter, because every call reads them."""
    adapters: int = 0

    def __post_init__(self) -> None:
        self.g_rows = dict(zip(self.numbers, self.g, strict=False))
        self.w_rows = dict(zip(self.numbers, self.w, strict=False))
        biases = [None] * len(self.numbers) if self.bias is None else self.bias
        self.bias_rows = dict(zip(self.numbers, biases, strict=False))
        self.adapters = len(self.numbers)

    def magnitude_grad(self, sum_N: torch.Tensor, number: int, of_y: bool) -> torch.Tensor:
        """Gradient of the magnitude from the sum over tokens of d z, or of d y if `of_y`, where y = g z. It is 0 where g is 0,
        since z cannot be recovered from y there."""
        if not of_y:
            return sum_N / self.w_rows[number]
        m_N = self.g_rows[number] * self.w_rows[number]
        return torch.where(m_N == 0, 0, sum_N / m_N)


@dataclass(slots=True)
class Operands:
    """Tensors of a group in the compute dtype: frozen weights and biases by layer, the A's stacked [rows, K] and the B's flat
    by layer (layout.Layout), and the scales of layers that have them."""

    frozen: tuple[FrozenWeight, ...]
    biases: tuple[torch.Tensor | None, ...]
    A_RK: torch.Tensor
    B: list[torch.Tensor | None]
    scales: dict[int, Scales]
    views: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Results of `A` and `block`, kept because every call reads them."""

    def A(self, layout: Layout, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One adapter's stacked A [R, K], and its transpose."""
        found = self.views.get((number,))
        if found is None:
            first, padded = layout.rows[number]
            A_RK = self.A_RK if padded == layout.num_rows else self.A_RK[first : first + padded]
            found = self.views[number,] = A_RK, A_RK.t()
        return found

    def block(self, layout: Layout, number: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """B of one adapter on one layer [N, padded], and its transpose."""
        found = self.views.get((number, index))
        if found is None:
            flat = self.B[index]
            assert flat is not None
            B_Nr = layout.b_block(flat, number, index)
            found = self.views[number, index] = B_Nr, B_Nr.t()
        return found


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of one adapter on one layer, in a wide dtype or the parameters' own, [N] each: the gradient of the
    magnitude, the sum of d z over w, and the sum of d. None where not wanted."""

    dm: torch.Tensor | None = None
    d: torch.Tensor | None = None


class Wanted(NamedTuple):
    """Gradients that a backward has to compute: of x, of any A, of any B, and the layers whose magnitudes and biases need
    one."""

    x: bool
    A: bool
    B: bool
    magnitudes: set[int]
    biases: set[int]


class Grads(NamedTuple):
    """Result of `Path.grads`: e per layer, dS [T, width] where it is needed, dB per layer in the layout of B, the sums per
    layer and adapter, and dA where it is computed from d' x."""

    e: list[torch.Tensor | None]
    dS: torch.Tensor | None
    dB: list[torch.Tensor | None]
    sums: list[dict[int, Sums]]
    dA: torch.Tensor | None = None


Gradients = Sequence[torch.Tensor | None]
"""Gradients by layer: one tensor [T, N] each, None where there is none. Gradients of outputs are contiguous and have the shape
of the outputs, [..., N], and so has an output that was kept: kernels read rows at any stride, and views cost the host time."""


class Path(Protocol):
    """The five steps. x_TK: tokens; keys_T2: their dropout keys; S [T, width], whose rows without an adapter and columns past
    an adapter's rank hold anything."""

    def down(
        self, call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, dropped: Dropped
    ) -> torch.Tensor: ...

    def up(
        self, call: Call, own: Operands, x_TK: torch.Tensor, dropped: Dropped, S: torch.Tensor | None, index: int,
        keep_z: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """y [T, N] of one layer, and z = x W' + S B' where it is to be kept (that of drop(x) in base-dropped segments). S: None
        where the plan makes none."""

    def magnitude(
        self, call: Call, own: Operands, index: int, d_TN: torch.Tensor, kept: torch.Tensor | None, wanted: Wanted
    ) -> tuple[torch.Tensor, dict[int, Sums]]:
        """e and the sums by adapter of one layer that has scales. kept: z, or y where the call says that it reads y."""

    def grads(
        self, call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, S: torch.Tensor | None,
        d: Gradients, kept: Gradients, wanted: Wanted,
    ) -> Grads:  # fmt: skip
        """S may be None where `Call.needs_S` says that no gradient is made of it."""

    def inputs(
        self, call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, dS: torch.Tensor | None,
        e: Gradients, d: Gradients, wanted: Wanted,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """dx [T, K] and the stacked dA [rows, K]."""


Dropped = Mapping[Segment, torch.Tensor]
"""drop(x) [t, K] of the segments that scale a base product of it, which other products of the forward read too."""
Launches = dict[Hashable, Any]
ScaleRows = Callable[[Launches, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int], None]
"""(launches, z, y, g, bias, minus): y = (g - minus) z + bias over rows [t, N]; without g it is 1. y may be z. launches: see
launcher.launch."""
AddDropped = Callable[[Launches, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""(launches, base, low, y, g, bias): y += (g - 1) base + g low + bias over rows [t, N], and z = base + low in the place of low,
for base = drop(x) c W' and low = S B'."""


@dataclass(slots=True)
class Call:
    """State shared by all calls in which `segments` of a group's adapters own the T tokens."""

    layout: Layout
    plan: Plan
    """Plan that is carried out: legal for the call, and ordered for the dtype."""
    segments: tuple[Segment, ...]
    salt: int
    lead: tuple[int, ...]
    """Leading sizes of x and of the outputs: all but the last."""
    T: int
    K: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    """Slots of the adapters that own tokens."""
    stacked: tuple[Stack, ...]
    parts: tuple[tuple[Part, ...], ...]
    """Segments whose adapter has a rank, per layer."""
    composed: dict[int, tuple[tuple[Segment, bool, bool], ...]]
    """Layers where a segment has a magnitude or a bias of its own: those segments, and whether each has the one, the other."""
    plan_up: tuple[Up, ...]
    """Plan.up per layer, as far as the layer allows it."""
    from_y: tuple[bool, ...]
    """Whether the backward of each layer reads y in place of z (z = y / g). It does not with a bias, where the difference would
    lose digits."""
    base_dropped: tuple[Segment, ...]
    """Segments that, on some layer, scale the base product of their dropped x."""
    wide: torch.dtype
    """Dtype of the gradients that kernels write."""
    shape: tuple[Layout, int, torch.dtype]
    """Key of a cached launch beside the tokens."""
    sums_dtype: torch.dtype
    """Dtype of the products that sum over the tokens, dA and dB."""
    down: Path
    up: tuple[Path, ...]
    magnitude: Path
    grads: Path
    inputs: Path
    scale_rows: ScaleRows | None = None
    add_dropped: AddDropped | None = None
    """None of a call that is not composed."""
    fused: bool = False
    """Fused products take these operands."""
    single_adapter: Segment | None = None
    """The segment that has all tokens and an adapter on every layer, if there is one."""
    threshold: int = 0
    """Dropout threshold of the single segment in the form that kernels take."""
    word: int = 0
    """The salt, as kernels take it."""
    whole: Stack | None = None
    """Stack of the only adapter, where it has all rows and columns of S and one factor: products make their results then, and
    write into nothing."""
    unread: torch.Tensor | None = None
    """Tensor of one element in the dtype, because torch needs an addend for a product that is scaled."""
    tables: GroupTables | None = None
    segment_tables: SegmentTables | None = None
    moving: bool = False
    """The segments are nominal: their boundaries are in the tables alone."""
    cut: dict[Hashable, Any] = field(default_factory=dict)
    """Block sizes that launches have chosen."""
    launches: Launches = field(default_factory=dict)
    """Launches of kernels that take the rows of a segment as arguments instead of reading tables."""
    own_tokens: dict[tuple[int, int], Call | None] = field(default_factory=dict)
    """The same call over consecutive tokens of these (own_tokens.py)."""
    wants: dict[tuple[bool, tuple[bool, ...]], tuple[Wanted, tuple[Slot, ...]]] = field(default_factory=dict)
    """Cached results of `wanted`."""

    @property
    def keeps_S(self) -> bool:
        return self.plan.keep_s and self.plan.up != "merged" and self.plan.dB == "S"

    def drop(self, x_tK: torch.Tensor, keys_T2: torch.Tensor | None, segment: Segment) -> torch.Tensor:
        """Rows of a segment with dropped elements 0."""
        if not segment.dropout:
            return x_tK
        assert keys_T2 is not None
        return masked(x_tK, segment.of(keys_T2), self.salt, segment.dropout, launches=self.launches)

    def dropped(self, x_TK: torch.Tensor, keys_T2: torch.Tensor | None) -> Dropped:
        """Rows of the segments that scale a base product of theirs, with dropped elements 0."""
        return {segment: self.drop(segment.of(x_TK), keys_T2, segment) for segment in self.base_dropped}

    def blocks(self, S: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """S, or dS, by Part.stack and Part.block: few views, which cost the host time."""
        return [
            (stack.all_layers.of(S),)
            if len(stack.widths) == 1
            else stack.all_layers.of(S).split_with_sizes(stack.widths, 1)
            for stack in self.stacked
        ]

    def wanted(self, need_x: bool, need_owned: tuple[bool, ...]) -> tuple[Wanted, tuple[Slot, ...]]:
        """Work of a backward that needs the gradients of x (`need_x`) and of the operands marked in `need_owned`, with the
        slots of those operands."""
        found = self.wants.get((need_x, need_owned))
        if found is None:
            slots = tuple(slot for slot in self.slots if need_owned[slot.at])
            layers: dict[str, set[int]] = {"A": set(), "B": set(), "magnitude": set(), "bias": set()}
            for slot in slots:
                layers[slot.name].add(slot.layer)
            wanted = Wanted(need_x, bool(layers["A"]), bool(layers["B"]), layers["magnitude"], layers["bias"])
            found = self.wants[need_x, need_owned] = wanted, slots
        return found

    def needs_S(self, wanted: Wanted) -> bool:
        """Whether a backward reads S."""
        return self.plan.grad == "one-pass" or (wanted.B and self.plan.dB == "S")
