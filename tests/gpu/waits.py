"""Nothing may wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises; that it does is tried first."""
    number = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            number.item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
