"""A browser that is started for its first user, replaced when it has died, and ended with its last user.

SharedBrowser   the browser of one or several environments of a process
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bus.errors import EnvError
from envs.contract.queueing import SharedLock, leave_if_given_up
from envs.tools.browser.cdp import Chromium

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses in seconds before starting a browser again: after no, one, two, ... browsers in a row that died
early."""

SHORT_LIFE_S = 30.0
STARTS_IN = 4
"""Limit of a start, in deadlines of one command: it has two commands, and a browser that hangs is ended
first."""


class SharedBrowser:
    """A browser of one or several environments. `starts` counts the browsers that were started so far.

    `flags` are added to its command line. It looks for the binary only when a browser is needed.
    """

    def __init__(
        self,
        find_binary: Callable[[], Path],
        *,
        scale: float,
        deadline_s: float,
        flags: Sequence[str] = (),
    ) -> None:
        self.starts = 0
        self._find_binary = find_binary
        self._scale = scale
        self._deadline_s = deadline_s
        self._flags = tuple(flags)
        self._lock = threading.Lock()  # guards users and browser, for moments only
        self._starting = SharedLock("the start of a shared browser")
        self._users = 0
        self._browser: Chromium | None = None
        self._started = 0.0
        self._short_lives = 0

    def join(self) -> None:
        """Count one more environment."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                atexit.register(self._end)

    def leave(self) -> None:
        """Count one environment less; the last one closes the browser."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                atexit.unregister(self._end)
                self._end()

    def browser(self) -> Chromium:
        """Return the live browser; start one if there is none. Raises EnvError."""
        if (browser := self._living()) is not None:
            return browser
        longest_s = BACK_OFF_S[-1] + STARTS_IN * self._deadline_s
        with self._starting.hold(longest_s, f"Chromium has been started for {longest_s:g} s"):
            return self._living() or self._start()

    def end(self) -> None:
        """End the browser, if there is one; the next user gets a new one without a pause."""
        with self._lock:
            self._end()

    def _living(self) -> Chromium | None:
        with self._lock:
            browser = self._browser
            return None if browser is None or browser.end_reason else browser

    def _start(self) -> Chromium:
        with self._lock:
            if self._browser is not None:
                logger.error("Chromium %d ended: %s", self._browser.pid, self._browser.end_reason)
                short = time.monotonic() - self._started < SHORT_LIFE_S
                self._short_lives = self._short_lives + 1 if short else 0
                self._end()
        time.sleep(BACK_OFF_S[min(self._short_lives, len(BACK_OFF_S) - 1)])
        leave_if_given_up()
        self._started = time.monotonic()
        self.starts += 1
        try:
            browser = Chromium(self._find_binary(), self._scale, self._deadline_s, self._flags)
        except EnvError:
            self._short_lives += 1
            raise
        logger.info("%s, start %d", browser.version, self.starts)
        with self._lock:
            if self._users > 0:
                self._browser = browser
                return browser
        browser.close()
        raise EnvError("the environments that share the browser were closed while it started")

    def _end(self) -> None:
        """End the browser; users of a derived class may also drop what they hold of it."""
        browser, self._browser = self._browser, None
        if browser is not None:
            browser.close()
