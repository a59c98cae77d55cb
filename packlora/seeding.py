"""Random numbers drawn from seeds and places: stable across processes, machines and versions."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """64 bits that depend on the parts alone, e.g. ("order", seed, epoch)."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
