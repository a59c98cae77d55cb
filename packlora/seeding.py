"""The one way numbers are drawn from names: stable across processes, machines and versions."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """64 bits that depend on the parts alone, e.g. (seed, job name, epoch)."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
