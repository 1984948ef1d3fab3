"""Warnings about refused messages, limited in rate."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

WARNING_INTERVAL_S = 1.0
"""Between two warnings of one log about messages that were refused."""


class RefusalLog:
    """Warns of refused messages once a second at most, so that a flood of them fills no disk."""

    def __init__(self) -> None:
        self._next_at = 0.0  # monotonic seconds
        self._skipped = 0

    def warn(self, text: str) -> None:
        """Log it, or only count it if the last warning is less than WARNING_INTERVAL_S old."""
        now = time.monotonic()
        if now < self._next_at:
            self._skipped += 1
            return
        more = f" (and {self._skipped} more since the last)" if self._skipped else ""
        log.warning("%s%s", text, more)
        self._next_at, self._skipped = now + WARNING_INTERVAL_S, 0
