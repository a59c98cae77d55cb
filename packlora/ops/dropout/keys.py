"""Counter-based dropout: a mask is a pure function of job, step, sample, position, feature and layer, never of earlier calls.

    keys_T2   two 32-bit words per token, made from (seed, step, sample, position)            -> token_keys
    salt      one 32-bit word per layer                                                       -> layer_salt
    mask[t,k] = lane(hash(keys_T2[t], salt, k // 2), k % 2) < threshold

One 32-bit hash serves two neighbouring features, 16 bits each: dropout costs about five integer instructions an element,
so a GPU kernel can recompute it wherever it is needed instead of storing it. Two rounds of multiply and xor-shift with
the constants of lowbias32 (github.com/skeeto/hash-prospector, public domain); the second key word enters between them,
so tokens whose first words differ by a multiple of the counter's stride do not share shifted masks.

The rate is a multiple of 2^-16 (0.1 becomes 0.100006) and survivors are scaled by one over the kept share exactly, so the
expectation is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

STRIDE, MIX_1, MIX_2 = 0x9E3779B1, 0x21F0AAAD, 0xD35A2D97
LANE = 1 << 16


def dropout_threshold(p: float) -> int:
    """Number of the 65536 lane values that are dropped. At least 1 for p > 0, at most 65535.

    Raises:
        ValueError: p is not in [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {p}")
    return 0 if p == 0.0 else min(max(round(p * LANE), 1), LANE - 1)


def dropout_factor(p: float) -> float:
    """Factor that scales the surviving elements: 1 / (share that is kept)."""
    return 1.0 / (1.0 - dropout_threshold(p) / LANE)


def layer_salt(name: str) -> int:
    """32 bits from the name of a layer: not its place in a pipeline, not its shard."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def _splitmix(value: np.ndarray) -> np.ndarray:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014), on uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


def token_keys(job_key: int, step: int, sample: int, num_tokens: int) -> np.ndarray:
    """Keys of the tokens of one sample, [num_tokens, 2] int32.

    Args:
        job_key: 64 bits made from the job's seed.
        step: optimizer step of the job, so that a sample seen again gets another mask.
        sample: number of the sample in the job's data.
        num_tokens: positions 0 .. num_tokens - 1.
    """
    return packed_token_keys([job_key], [step], [sample], [num_tokens])


def packed_token_keys(
    job_keys: Sequence[int], steps: Sequence[int], samples: Sequence[int], lengths: Sequence[int]
) -> np.ndarray:
    """token_keys of several samples, one after the other, [sum of lengths, 2] int32."""
    key, step, sample = (np.array(words, np.uint64) for words in (job_keys, steps, samples))
    after = np.cumsum(lengths)
    position = np.arange(after[-1]) - np.repeat(after - lengths, lengths)
    gamma, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    with np.errstate(over="ignore"):
        key = _splitmix(_splitmix(key + gamma * (step + one)) + gamma * (sample + one))
        keys = _splitmix(np.repeat(key, lengths) + gamma * (position.astype(np.uint64) + one))
    return keys.view(np.int32).reshape(-1, 2)


def keys_from(keys_T2: torch.Tensor, salt: int, first_feature: int) -> torch.Tensor:
    """Keys [T, 2] with which the mask of features 0, 1, ... is that of first_feature, first_feature + 1, ... with `keys_T2`.

    For a slice of what is dropped. The number of a feature enters the hash by a sum, so it can be in the key beforehand.

    Args:
        salt: that the keys are used with.
        first_feature: even, as one hash serves two features.

    Raises:
        ValueError: it is odd.
    """
    if first_feature % 2:
        raise ValueError(f"a slice of what is dropped begins at an even feature, not at {first_feature}")
    word, before = signed(salt), signed(first_feature // 2 * STRIDE % (1 << 32))
    return torch.stack([((keys_T2[:, 0] ^ word) + before) ^ word, keys_T2[:, 1]], 1)


def signed(word: int) -> int:
    """A 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift_xor_(v: torch.Tensor, bits: int) -> torch.Tensor:
    """v ^= v >>> bits, in place; int32 shifts are arithmetic in torch, hence the mask."""
    return v.bitwise_xor_((v >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def dropped(keys_T2: torch.Tensor, salt: int, num_features: int, p: float) -> torch.Tensor:
    """Mask of the elements that are dropped, bool [T, num_features].

    Args:
        keys_T2: int32 [T, 2], from token_keys.
        salt: from layer_salt.
        num_features: K, the width of what is dropped.
        p: rate in [0, 1).
    """
    return _lanes(keys_T2, salt, num_features) < dropout_threshold(p) - LANE // 2


def uniform(keys_T2: torch.Tensor, salt: int, num_features: int) -> torch.Tensor:
    """Numbers of (-1, 1), evenly distributed over the 65536 odd multiples of 2^-16, float32 [T, num_features]; see dropped."""
    return (_lanes(keys_T2, salt, num_features).float() + 0.5) / (LANE // 2)


def _lanes(keys_T2: torch.Tensor, salt: int, num_features: int) -> torch.Tensor:
    """The 16 bits of each element, int16 [T, num_features]."""
    pairs = (num_features + 1) // 2
    counter = torch.arange(pairs, dtype=torch.int32, device=keys_T2.device) * signed(STRIDE)
    v = counter + (keys_T2[:, :1] ^ signed(salt))
    _shift_xor_(v, 16).mul_(signed(MIX_1)).bitwise_xor_(keys_T2[:, 1:])
    _shift_xor_(v, 15).mul_(signed(MIX_2))
    _shift_xor_(v, 15)
    return v.view(torch.int16)[:, :num_features]  # little-endian: feature 2j is the low half
