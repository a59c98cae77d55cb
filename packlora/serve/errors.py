"""Refusals of a request, in words."""

from __future__ import annotations

from collections.abc import Mapping


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        text: names the field, what was found and what is accepted.
        status: HTTP status; 400 for what the client sent, 404 for what its key does not see, 410 for what is over, 429 for
            too much work.
        wait: seconds after which to try again.
    """

    def __init__(self, text: str, status: int = 400, wait: float | None = None) -> None:
        super().__init__(text)
        self.text, self.status, self.wait = text, status, wait

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""
        return {} if self.wait is None else {"retry-after": str(max(1, round(self.wait)))}


class Failed(Exception):
    """A promise that was given and cannot be kept. category: whose fault it is, `user` or `server`."""

    def __init__(self, text: str, category: str = "user") -> None:
        super().__init__(text)
        self.text, self.category = text, category
