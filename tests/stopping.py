"""A signal that comes while a command waits for a call that hangs."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dart_cli.runtime.waits import OpenWaits


def signal_in(monkeypatch: pytest.MonkeyPatch, what: str, number: int) -> None:
    """Send this process the signal once, as soon as it waits for `what`.

    Environments that hang are abandoned at once.
    """
    monkeypatch.setattr("dart_cli.env.carriers.CLOSE_DEADLINE_S", 0.0)
    waiting_before, sent = OpenWaits.waiting, threading.Event()

    def waiting(
        waits: OpenWaits, text: str, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[None]:
        if what in text and not sent.is_set():
            sent.set()
            threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
        return waiting_before(waits, text, *args, **kwargs)

    monkeypatch.setattr(OpenWaits, "waiting", waiting)
