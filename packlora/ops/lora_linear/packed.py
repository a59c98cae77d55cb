"""Packed operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packlora.ops.lora_linear.layout import Layout, Place
from packlora.ops.lora_linear.types import Layer
from packlora.ops.stamp import Stamps, stamps


class Packed:
    """A's of a group stacked and B's flattened, in the compute dtype and padded with zeros.

    `refresh` copies the parameters in. Where they are `trusted` a parameter is copied only when its stamp (ops/stamp.py) is
    another; else always: optimizers that write through `.data` or by their own kernels do not move the version. Operands that
    already lie as they should (one adapter, no padding, the compute dtype) are used in place. All calls are for layers with the
    same operands, the very objects.
    """

    def __init__(self, layout: Layout, K: int, dtype: torch.dtype, device: torch.device, trusted: bool = False) -> None:
        self.layout, self.trusted = layout, trusted
        self.shape = (layout, K, dtype)
        self._make = (K, dtype, device)
        self._A: torch.Tensor | None = None
        self.B: list[torch.Tensor | None] = [None] * len(layout.b_sizes)
        self._owns_A, self._owns_B = False, [False] * len(layout.b_sizes)
        self._used: tuple[int, int, torch.Tensor, int, torch.Tensor, int] | None = None
        """Adapter, layer, and A and B with their addresses, where there are no others and both are used where they are."""
        self._slots: dict[tuple[str, int, int], torch.Tensor] = {}
        self._operands: list[torch.Tensor] = []
        """A and B by place."""
        self._seen: Stamps = None
        """Theirs when they were copied last, where they are trusted."""
        self._blocks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """What b_block gave last, and of which flat B."""

    @property
    def A_RK(self) -> torch.Tensor:
        assert self._A is not None
        return self._A

    def refresh(self, layers: Sequence[Layer]) -> None:
        """Copy the parameters in, by one call for all that have to be copied."""
        if self._as_they_were(layers):
            return
        if not self._operands:
            lows = [layers[index].adapters[number] for number, index in self.layout.places]
            self._operands = [operand for low in lows for operand in (low.A, low.B) if operand is not None]
        before, now = self._seen, stamps(self._operands) if self.trusted else None
        if now is not None and now == before:
            return
        self._seen = now
        into: list[torch.Tensor] = []
        out_of: list[torch.Tensor] = []
        for at, ((number, index), place) in enumerate(self.layout.places.items()):
            own = slice(2 * at, 2 * at + 2)
            if now is not None and before is not None and now[own] == before[own]:
                continue
            low = layers[index].adapters[number]
            assert low.A is not None and low.B is not None
            if self._in_place(place, low.A, len(self.layout.places) == 1):
                if self._A is None or self._owns_A or self._A.data_ptr() != low.A.data_ptr():
                    self._A = low.A.detach()
                    self._owns_A = False
                    self._slots.pop(("A", number, index), None)
            else:
                into.append(self._A_slot(number, index, place))
                out_of.append(low.A)
            if self._in_place(place, low.B, self.layout.b_sizes[index] == low.B.shape[0] * place.padded):
                known = self.B[index]
                if known is None or self._owns_B[index] or known.data_ptr() != low.B.data_ptr():
                    self.B[index] = low.B.detach().view(-1)
                    self._owns_B[index] = False
                    self._slots.pop(("B", number, index), None)
            else:
                into.append(self._B_slot(number, index, place))
                out_of.append(low.B)
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, out_of)
        self._used = None
        if len(self.layout.places) == 1 and not self._slots:
            (((number, index), _),) = self.layout.places.items()
            A, B = layers[index].adapters[number].A, layers[index].adapters[number].B
            assert A is not None and B is not None
            self._used = number, index, A, A.data_ptr(), B, B.data_ptr()

    def _as_they_were(self, layers: Sequence[Layer]) -> bool:
        """Whether all operands are used where they are, and still lie there."""
        if self._used is None:
            return False
        number, index, A, A_at, B, B_at = self._used
        low, dtype = layers[index].adapters[number], self._make[1]
        return (
            low.A is A and low.B is B and A.data_ptr() == A_at and B.data_ptr() == B_at and A.dtype == dtype
            and B.dtype == dtype
        )  # fmt: skip

    def _in_place(self, place: Place, operand: torch.Tensor, alone: bool) -> bool:
        """Whether the operand can be used where it is."""
        return (
            alone and place.rank == place.padded and operand.dtype == self._make[1] and operand.is_contiguous()
            and operand.data_ptr() % 16 == 0
        )  # fmt: skip

    def _A_slot(self, number: int, index: int, place: Place) -> torch.Tensor:
        """Where an A is copied to."""
        slot = self._slots.get(("A", number, index))
        if slot is None:
            K, dtype, device = self._make
            with torch.inference_mode(False):
                if not self._owns_A:
                    self._A = torch.zeros(self.layout.num_rows, K, dtype=dtype, device=device)
                    self._owns_A = True
                first = self.layout.rows[number][0] + place.column
                assert self._A is not None
                slot = self._slots["A", number, index] = self._A[first : first + place.rank]
        return slot

    def _B_slot(self, number: int, index: int, place: Place) -> torch.Tensor:
        """Where a B is copied to."""
        slot = self._slots.get(("B", number, index))
        if slot is None:
            _, dtype, device = self._make
            with torch.inference_mode(False):
                if not self._owns_B[index]:
                    self.B[index] = torch.zeros(self.layout.b_sizes[index], dtype=dtype, device=device)
                    self._owns_B[index] = True
                slot = self._slots["B", number, index] = self.b_block(number, index)[:, : place.rank]
        return slot

    def b_block(self, number: int, index: int) -> torch.Tensor:
        """B of one adapter on one layer, [N, padded]."""
        flat = self.B[index]
        assert flat is not None
        known = self._blocks.get((number, index))
        if known is None or known[0] is not flat:
            known = self._blocks[number, index] = (flat, self.layout.b_block(flat, number, index))
        return known[1]
