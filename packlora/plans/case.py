"""Case: everything of a group of layers and of a microbatch that decides which plan is fastest, and nothing else.

Rates of dropout, scalings and values do not matter to time, so they are not in it; neither does the order of the adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from packlora.ops import gpu
from packlora.ops.lora_linear.plan import Rounding, Situation, Target
from packlora.ops.lora_linear.types import Layer, Segment, situation


def token_bucket(tokens: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... (powers of two and 1.5 times them): at most half more than `tokens`.

    Raises:
        ValueError: tokens is not positive.
    """
    if tokens < 1:
        raise ValueError(f"a case needs at least one token, got {tokens}")
    power = 1 << (tokens - 1).bit_length()
    between = power // 4 * 3
    return between if tokens <= between else power


@dataclass(frozen=True, slots=True)
class Case:
    """A group of layers that read the same x, and the adapters of a microbatch on it. `Case.of` puts it in normal form."""

    device: str
    """cpu or cuda."""
    dtype: str
    """Dtype of x and W, for example bfloat16."""
    tokens: int
    """A bucket, see token_bucket."""
    K: int
    Ns: tuple[int, ...]
    """Outputs of each layer."""
    ranks: tuple[tuple[int, ...], ...]
    """Rank by adapter and layer; 0 where the adapter does not target the layer."""
    drops: tuple[bool, ...]
    """Whether each adapter has dropout."""
    biases: tuple[bool, ...]
    """Whether each layer has a bias."""
    covered: bool = True
    """Every token belongs to an adapter."""
    needs: tuple[bool, bool, bool] = (True, True, True)
    """Whether the gradients of x, of the A's and of the B's are wanted."""
    composed: bool = False
    """One of the adapters has a magnitude (DoRA) or trains the bias: outputs are scaled and shifted by adapter."""
    base_dropped: bool = False
    """A DoRA adapter under dropout scales the base product of the dropped x: there are two base products."""
    tf32: bool = False
    """float32 products may be rounded to TF32."""
    moving: bool = False
    """The boundaries of the adapters' tokens are on the device alone (ops.lora_linear.moving)."""

    @staticmethod
    def of(
        device: torch.device,
        dtype: torch.dtype,
        tokens: int,
        K: int,
        Ns: Sequence[int],
        ranks: Iterable[Sequence[int]],
        drops: Iterable[bool],
        biases: Sequence[bool],
        covered: bool = True,
        needs: tuple[bool, bool, bool] = (True, True, True),
        composed: bool = False,
        base_dropped: bool = False,
        moving: bool = False,
    ) -> Case:
        """Case in normal form: tokens rounded to their bucket, adapters without a rank on any of the layers left out (their
        tokens count as tokens without an adapter), and the others in a fixed order.

        Raises:
            ValueError: lengths do not agree, or a number is not positive.
        """
        given = [(tuple(by_layer), drop) for by_layer, drop in zip(ranks, drops, strict=True)]
        adapters = sorted(((by_layer, drop) for by_layer, drop in given if any(by_layer)), reverse=True)
        if len(biases) != len(Ns) or any(len(by_layer) != len(Ns) for by_layer, _ in adapters) or not Ns:
            raise ValueError(f"{len(Ns)} layers, but {len(biases)} biases and ranks {[ranks for ranks, _ in adapters]}")
        if min(K, *Ns) < 1 or any(rank < 0 for by_layer, _ in adapters for rank in by_layer):
            raise ValueError(
                f"K {K}, N {tuple(Ns)} must be positive and ranks {[ranks for ranks, _ in adapters]} not negative"
            )
        tf32 = device.type == "cuda" and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        return Case(
            device.type, str(dtype).removeprefix("torch."), token_bucket(tokens), K, tuple(Ns),
            tuple(by_layer for by_layer, _ in adapters), tuple(drop for _, drop in adapters), tuple(biases),
            covered and len(adapters) == len(given), needs, composed, base_dropped, tf32, moving,
        )  # fmt: skip

    @staticmethod
    def of_call(x: torch.Tensor, layers: Sequence[Layer], segments: Sequence[Segment], moving: bool = False) -> Case:
        """Case of a call of lora_group.

        Args:
            x: [..., K].
            layers: those that read x.
            segments: who owns which of its T tokens.
            moving: the segments are nominal.
        """
        K = x.shape[-1]
        T = x.numel() // K
        call = situation(layers, segments, T, not moving)
        return Case.of(
            x.device, x.dtype, T, K, [layer.frozen.shape[0] for layer in layers],
            [[low.rank if (low := layer.adapters.get(segment.adapter)) else 0 for layer in layers] for segment in segments],
            [segment.dropout > 0 for segment in segments], [layer.bias is not None for layer in layers],
            sum(segment.stop - segment.start for segment in segments) == T, (x.requires_grad, True, True), call.composed,
            call.base_dropped, moving,
        )  # fmt: skip

    @property
    def single(self) -> bool:
        """One adapter owns all tokens."""
        return self.covered and len(self.ranks) == 1 and not self.moving

    def situation(self, rounding: Rounding = "exact") -> Situation:
        """Properties of the case that decide which plans compute it on this device, as exactly as `rounding` demands
        (plan.why_not)."""
        low_rank, double = bool(self.ranks), self.dtype == "float64"
        return Situation(
            self.single,
            low_rank,
            any(self.drops),
            self.composed,
            self.base_dropped,
            double,
            moving=self.moving,
            target=self.target._replace(rounding=rounding),
        )

    @property
    def target(self) -> Target:
        """Device of this machine, and the sizes of the case. On a machine without a GPU, a case of a GPU gets one of the oldest
        GPUs that have the kernels."""
        sizes = (self.K, *self.Ns)
        if self.device != "cuda" or not torch.cuda.is_available():
            missing = None if gpu.HAS_TRITON else "the triton package is not installed"
            no_kernels = missing if self.device == "cuda" else gpu.why_no_kernels(torch.device(self.device))
            return Target(self.device == "cuda", self.dtype, no_kernels, False, False, sizes)
        device = torch.device("cuda", torch.cuda.current_device())
        narrow = self.torch_dtype.itemsize == 2
        rounds_first = narrow and gpu.rounds_before_adding(device)
        return Target(True, self.dtype, gpu.why_no_kernels(device), gpu.has_copy_engine(device), rounds_first, sizes)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def key(self) -> str:
        """One line for files and tables: `cuda bfloat16 T2048 K4096 N4096+1024 r16+16/8+0 drop1/0 grads:xAB`, then, where they
        hold: bias1+0, base-only-tokens, composed, base-dropped, tf32, moving."""
        words = [
            self.device, self.dtype, f"T{self.tokens}", f"K{self.K}", f"N{'+'.join(map(str, self.Ns))}",
            f"r{'/'.join('+'.join(map(str, by_layer)) for by_layer in self.ranks) or '-'}",
            f"drop{'/'.join(str(int(drop)) for drop in self.drops) or '-'}",
            f"grads:{''.join(name for name, need in zip('xAB', self.needs, strict=True) if need) or '-'}",
        ]  # fmt: skip
        if any(self.biases):
            words.append(f"bias{'+'.join(str(int(bias)) for bias in self.biases)}")
        flags = {
            "base-only-tokens": not self.covered, "composed": self.composed, "base-dropped": self.base_dropped,
            "tf32": self.tf32, "moving": self.moving,
        }  # fmt: skip
        words += [word for word, holds in flags.items() if holds]
        return " ".join(words)
