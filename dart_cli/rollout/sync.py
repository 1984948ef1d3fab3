"""Taking new weights while the worker serves, in turn with the other workers.

    WeightSync.observe  notes the version that the data service announces (RunState)
    WeightSync.follow   takes each announced set: prepare, get a permit, receive, load, report

A set is taken in these steps:

1. Prepare. Over a broadcast all workers receive a set together, while they serve and while they wait for
   permits (dart_cli/weights/broadcast). Sets in files need no preparation.
2. Get a permit. The data service holds a SyncRequest until it is this worker's turn. At most
   `weights.concurrent` workers take weights at once, so that the others serve. The reply names the newest set
   at that moment, so that versions in between are skipped.
3. Receive the set over the run's channel (dart_cli/weights), unless it was prepared, and check it. While the
   engine loads a set nothing is received, because it loads from the worker's only copy.
4. Load the set into the engine, which goes on serving.
5. Report. SyncDone returns the permit and has the seconds of each part.

A set is checked before the engine is touched: its manifest against the digest that the trainer announced, its
files against the manifest, and its tensors against the model. If a set is refused, the old weights go on
serving. The cause is in SyncDone, and in the heartbeat until a set is taken. The set is tried again after
`RETRY_S`, because a full disk or a slow mount may have been the cause. The old weights also serve while the
data service does not answer. Versions never decrease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from bus.errors import DeadlineError, EngineError, RefusedError, StoreError, WeightsError
from bus.heartbeat import WaitReporter
from bus.messages import RunState
from bus.requests import RequestClient
from bus.weights import SyncDone, SyncReply, SyncRequest
from dart_cli.config.schema import LoraConfig
from dart_cli.config.schema.weights import PERMIT_S
from dart_cli.engines.base import Engine, UpdateTiming
from dart_cli.policy.weight_set import directory_of
from dart_cli.runtime.background import background
from dart_cli.weights.manifest import check_adapters
from dart_cli.weights.receiver import ReceivedWeights, Receiver

log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds from a refused set, or a refused request, to the next attempt."""
ASK_AGAIN_S = 0.1
"""Shortest time in seconds between two requests, for a data service that does not hold them."""
_REFUSALS = (RefusedError, StoreError)
"""Refusals of the data service. It raises StoreError before it ends because its disk is full."""
_ELSEWHERE = (
    "; was it removed, or written on another host? With workers on several hosts, set "
    "weights.directory to a folder that all hosts see"
)
REPORT_S = 5.0
"""Seconds for which SyncDone is tried. The data service frees a permit by itself after PERMIT_S."""


class HeartbeatReporter(WaitReporter, Protocol):
    """The part of bus.heartbeat.HeartbeatSender that this module uses."""

    def beat(self) -> object:
        """Publish a heartbeat now."""
        ...


@dataclass
class SyncTotals:
    """Seconds and counts of all rounds so far, as gauges of the heartbeat."""

    syncs: float = 0.0  # sets taken
    refused: float = 0.0  # sets refused
    sync_wait_s: float = 0.0  # waiting for permits
    transfer_s: float = 0.0  # reading and checking sets; requests were served meanwhile
    pause_s: float = 0.0  # halts in which no request was served
    pause_last_s: float = 0.0  # the last such halt


class WeightSync:
    """Keeps the weights of one engine at the newest published version."""

    def __init__(
        self,
        engine: Engine,
        worker: str,
        data_service: RequestClient,
        heartbeat: HeartbeatReporter,
        deadline_s: float,
        receiver: Receiver,
        lora: LoraConfig | None = None,
    ) -> None:
        """Take weights for `engine`; with `lora`, sets are adapters of this configuration.

        `deadline_s` bounds a request to the data service, and `receiver` receives the sets that permits name.
        """
        self._engine = engine
        self._receiver = receiver
        self._lora = lora
        self._worker = worker
        self._data_service = data_service
        self._deadline_s = deadline_s
        self._heartbeat = heartbeat
        self._announced = -1
        self._news = asyncio.Event()
        self._prepared_version = -1  # the newest announced version that was tried
        self._to_prepare = asyncio.Event()  # set when a version is announced
        self._is_prepared = asyncio.Event()  # set when `_prepared_version` changes
        self._prepare_s = 0.0  # since the last round
        # held while the receiver's copy is received, or while the engine loads from it
        self._copy = asyncio.Lock()
        self.ready = asyncio.Event()  # set once published weights serve
        self.is_syncing = False  # from the permit until the set serves or is refused
        self.refusal = ""  # why the newest set does not serve; empty if it does
        self._refusal_wait = ExitStack()  # keeps the refusal in the heartbeat
        self._refused_at: float | None = None  # monotonic seconds of the first refusal in a row
        self.totals = SyncTotals()

    def observe(self, state: RunState) -> None:
        """Note an announcement; `follow` acts on it."""
        if state.policy_version > self._announced:
            self._announced = state.policy_version
            self._news.set()
            self._to_prepare.set()

    async def follow(self) -> None:
        """Take each announced set, until cancelled.

        Raises the errors of the bus and of the engine. Weights that do not fit are refused without an error,
        but an engine that fails while it loads them can no longer serve.
        """
        with self._refusal_wait:
            async with background(self._prepare()):
                while True:
                    if self.refusal or not self._is_behind():
                        await self._wait_for_news()
                    self._news.clear()
                    if self._is_behind():
                        await self._sync()

    async def _prepare(self) -> None:
        """Prepare each announced version once, until cancelled."""
        while True:
            await self._to_prepare.wait()
            self._to_prepare.clear()
            async with self._copy:
                began, version = time.monotonic(), self._announced
                if version > self._version:
                    await self._receiver.prepare(version)
            self._prepare_s += time.monotonic() - began
            self._prepared_version = version
            self._is_prepared.set()

    async def _await_prepared(self) -> None:
        """Wait until `_prepare` has tried to prepare the announced version, with or without success."""
        announced = self._announced
        while self._prepared_version < announced:
            self._is_prepared.clear()
            await self._is_prepared.wait()

    async def _wait_for_news(self) -> None:
        """Wait for an announcement, or until a refused set may be tried again."""
        try:
            # asyncio.wait_for may swallow a cancellation before Python 3.12.
            async with asyncio.timeout(RETRY_S if self.refusal else None):
                await self._news.wait()
        except TimeoutError:
            log.info("tries the refused weights again")

    def _is_behind(self) -> bool:
        return self._announced > self._version

    @property
    def _version(self) -> int:
        """The version that serves; -1 before the first."""
        return self._engine.policy_version if self.ready.is_set() else -1

    async def _sync(self) -> None:
        """Run one round: wait for the permit, take the set that it names, and report the result."""
        # 1. Prepare, and get a permit.
        await self._await_prepared()
        prepare_s, self._prepare_s = self._prepare_s, 0.0
        began = time.monotonic()
        permit = await self._permit()
        waited_s = time.monotonic() - began
        gauges = self._engine.gauges()
        self.is_syncing = True
        self._heartbeat.beat()
        # 2. Receive the set and load it, unless it already serves and only the permit has to be returned.
        error, timing, version = "", UpdateTiming(0.0, 0.0), permit.policy_version
        broken: EngineError | None = None
        try:
            if version > self._version:
                async with self._copy:
                    received, receive_s = await self._receive(permit)
                    version = received.policy_version
                    timing = await self._engine.update_weights(received.source, version)
                receive_s += prepare_s
                timing = replace(timing, transfer_s=timing.transfer_s + receive_s)
        except (WeightsError, TimeoutError) as problem:
            error = str(problem) or type(problem).__name__
            if not _is_here(Path(permit.path)):
                error += _ELSEWHERE
        except EngineError as problem:
            error, broken = str(problem), problem
        finally:
            self.is_syncing = False
        # 3. Report the result.
        if broken is None:
            self._note(version, error)
        self._heartbeat.beat()
        self._count(waited_s, timing, error)
        await self._report(
            SyncDone(
                worker=self._worker,
                policy_version=version,
                error=error,
                waited_s=waited_s,
                transfer_s=timing.transfer_s,
                pause_s=timing.pause_s,
                in_flight=int(gauges["in_flight"] + gauges["waiting"]),
            )
        )
        if broken is not None:
            raise broken

    async def _permit(self) -> SyncReply:
        """Wait for a permit of the data service, without a limit, while the old weights serve."""
        reason, began = "the data service to answer", time.monotonic()
        while True:
            what = f"its turn to take weights v{self._announced}: {reason}"
            with self._heartbeat.waiting(what, since=began, on="permit"):
                requested_at = time.monotonic()
                try:
                    reply = await self._data_service.request(
                        SyncRequest(worker=self._worker, policy_version=self._version),
                        self._deadline_s,
                    )
                except DeadlineError as error:
                    log.warning("%s; goes on serving v%d", error, self._version)
                    continue
                except _REFUSALS as error:
                    log.warning("%s; asks again in %.0f s", error, RETRY_S)
                    await asyncio.sleep(RETRY_S)
                    continue
                assert isinstance(reply, SyncReply)
                if reply.granted:
                    return reply
                await asyncio.sleep(max(0.0, requested_at + ASK_AGAIN_S - time.monotonic()))
            reason = reply.reason

    async def _receive(self, permit: SyncReply) -> tuple[ReceivedWeights, float]:
        """Receive the set that `permit` names, or a later one; return it, and the seconds that this took.

        Raises WeightsError if no such set arrives, or its adapters do not fit the configuration.
        """
        began, path = time.monotonic(), Path(permit.path)
        received = await self._receiver.receive(path, permit.policy_version, permit.digest)
        await asyncio.to_thread(check_adapters, directory_of(received.source), self._lora)
        return received, time.monotonic() - began

    def _note(self, version: int, error: str) -> None:
        """Note that the set serves, or the `error`, which heartbeats report from now on."""
        self._refusal_wait.close()
        self.refusal = error and f"weights v{version} refused: {error}"
        if error:
            serving = (
                f"v{self._version} goes on serving" if self._version >= 0 else "serves nothing yet"
            )
            log.warning("%s; %s", self.refusal, serving)
            if self._refused_at is None:
                self._refused_at = time.monotonic()
            what = f"weights that fit; {self.refusal}"
            self._refusal_wait.enter_context(
                self._heartbeat.waiting(what, since=self._refused_at, on="weights")
            )
        else:
            self._refused_at = None
            self.ready.set()

    def _count(self, waited_s: float, timing: UpdateTiming, error: str) -> None:
        totals = self.totals
        totals.sync_wait_s += waited_s
        totals.transfer_s += timing.transfer_s
        if error:
            totals.refused += 1
        else:
            totals.syncs += 1
            totals.pause_s += timing.pause_s
            totals.pause_last_s = timing.pause_s

    async def _report(self, report: SyncDone) -> None:
        try:
            await self._data_service.request(report, REPORT_S)
        except (DeadlineError, *_REFUSALS) as error:
            log.warning("%s; the data service takes the permit back after %.0f s", error, PERMIT_S)


def _is_here(path: Path) -> bool:
    """Return True if the set is on this host. Links into another host's shared memory have no target here."""
    try:
        return all(entry.exists() for entry in path.iterdir())
    except OSError:
        return False
