"""Limits of what one request, and one owner, may ask for. An error that names a limit names it as here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a service."""

    body_bytes: int = 64 * 2**20
    """Bytes of a request's body; the client cuts its own at 5 million."""
    json_bytes: int = 16 * 2**20
    """Bytes of a body of JSON: nobody else is answered while it is read."""
    waiting_bytes: int = 1 << 30
    """Bytes of all training requests that wait; more are answered 429."""
    waiting_requests: int = 4096
    """Requests of one owner that wait; more are answered 429."""
    datums: int = 8192
    """Samples of a forward_backward."""
    targets: int = 1 << 20
    """Targets of a forward_backward, all samples and all soft targets together."""
    soft_targets: int = 4096
    """Targets at one place."""
    rank: int = 512
    models: int = 256
    """Open models of one owner."""
    sessions: int = 1024
    """Open sessions of one owner."""
    samplers: int = 256
    """Unnamed sampling sessions of one owner whose weights are kept; then the one that was sampled longest ago is closed."""
    samples: int = 1024
    """num_samples of an asample."""
    likeliest: int = 64
    """topk of a sample or of a prompt."""
    checkpoints: int = 4096
    """Checkpoints of one owner on the disk."""
    name_length: int = 120
    """Characters of a checkpoint's name."""
    metadata_bytes: int = 65536
    """Bytes of user_metadata as JSON."""
    json_depth: int = 32
    """Depth of a JSON body."""
    spans: int = 1 << 16
    """Stop tokens of an asample, spans of a datum."""
    stop_strings: int = 64
    """Stop strings of an asample: each is looked for at every token."""
    stop_characters: int = 1024
    """Characters of a stop string."""
