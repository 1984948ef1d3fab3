"""Taking new weights while serving.

    WeightSync.hear     notes what data announces (RunState); keeps only the newest
    WeightSync.follow   takes it whenever the engine is behind; intermediate versions are skipped

The engine validates a set before it touches anything and swaps between two batches, so requests
only wait, and a set that is refused leaves the old weights serving. The refusal is told in the
heartbeat until a set is taken; the same version is tried again after `RETRY_S`, since a full disk
or a slow mount may have been the cause. Versions only ever rise: an announcement that is older than
what serves is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from bus.errors import EngineError, WeightsError
from bus.messages import RunState
from dart_cli.engines.base import Engine
from dart_cli.weights.file import newest

log = logging.getLogger(__name__)

RETRY_S = 10.0


class WeightSync:
    """Keeps one engine at the newest published weights."""

    def __init__(self, engine: Engine, retry_s: float = RETRY_S) -> None:
        self._engine = engine
        self.retry_s = retry_s
        self._wanted: RunState | None = None
        self._changed = asyncio.Event()
        self.ready = asyncio.Event()  # set once published weights serve
        self.syncing = False
        self.refusal = ""  # why the newest set does not serve; empty if it does
        self.synced = 0  # sets taken
        self.sync_s = 0.0  # seconds spent on taking them, requests served meanwhile
        self.pause_s = 0.0  # seconds of these in which no request was served

    def hear(self, state: RunState) -> None:
        """Note an announcement; `follow` acts on the newest."""
        if state.policy_version >= 0 and self._is_newer(state):
            self._wanted = state
            self._changed.set()

    async def follow(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """Take what is announced, for ever; ends by cancellation only.

        `waiting` tells what is waited for while a set is refused (HeartbeatSender.waiting).
        """
        with ExitStack() as told:
            while True:
                try:
                    await asyncio.wait_for(
                        self._changed.wait(), self.retry_s if self.refusal else None
                    )
                except TimeoutError:
                    log.info("tries the refused weights again")
                self._changed.clear()
                if self._wanted is not None and self._is_behind(self._wanted):
                    await self._take(self._wanted)
                    told.close()
                    if self.refusal:
                        told.enter_context(waiting(f"weights that fit; {self.refusal}"))

    def _is_newer(self, state: RunState) -> bool:
        return self._wanted is None or state.policy_version > self._wanted.policy_version

    def _is_behind(self, wanted: RunState) -> bool:
        return not self.ready.is_set() or wanted.policy_version > self._engine.policy_version

    async def _take(self, wanted: RunState) -> None:
        path, version = await asyncio.to_thread(_locate, wanted)
        started = time.monotonic()
        self.syncing = True
        try:
            timing = await self._engine.update_weights(path, version)
        except (WeightsError, EngineError, TimeoutError) as error:
            self.refusal = f"weights v{version} refused: {error}"
            log.warning("%s; v%d goes on serving", self.refusal, self._engine.policy_version)
            return
        finally:
            self.syncing = False
        self.refusal = ""
        self.synced += 1
        self.sync_s += time.monotonic() - started
        self.pause_s += timing.pause_s
        self.ready.set()


def _locate(wanted: RunState) -> tuple[Path, int]:
    """Where the announced version is; the newest beside it if it has been removed meanwhile."""
    path = Path(wanted.weights_path)
    if not path.exists():
        found = newest(path.parent)
        if found is not None and found.policy_version > wanted.policy_version:
            return found.path, found.policy_version
    return path, wanted.policy_version
