"""Results of functions that may be `async`."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


def awaited(found: Any) -> Any:
    """A value, which is waited for where it is awaitable."""
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found
