"""Routes each request to the least loaded rollout worker, and to another one if that fails.

    fresh           leaves out candidates whose weights are too old
    choose          chooses a worker among candidates
    RolloutRouter   the policy of an episode: all rollout workers of the run behind `act`
    RoutingStats    the counters of a router

A worker is a candidate if it is alive and connected, its state is `ready` (or `syncing`, if no worker is
ready), and its weights are at most `max_staleness` versions behind the newest. `choose` takes one of the
candidates. If the connection to it is lost, or it falls silent or stops, the same request is sent to another
worker with the same id. A worker counts as silent only while heartbeats of other processes arrive: if none
arrives at all, the data service, which forwards them, is absent, and the workers stay in use.

`choose` is a pure function, so that it can be simulated: the worker with the fewest requests of this process
in flight wins, then the one with the fewest trajectories assigned, then a random one. Requests of other
processes are left out on purpose: this process sees them only in heartbeats, which are up to a second old, so
that all processes of a run would choose the same worker until the next heartbeat (Mitzenmacher, "How useful
is old information?", 2000). tests/env/test_load_balancing.py simulates both.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random

from bus.endpoints import CurveKeys
from bus.errors import BusError, DartError, DeadlineError
from bus.heartbeat import REROUTE_AFTER_S, Liveness, WaitReporter, awaited, start
from bus.messages import ActRequest, Completion, Heartbeat
from bus.requests import Requester

AFFINITY = 2
"""Requests that a trajectory's former worker may have in flight beyond the least loaded one.

A hit in the prefix cache saves most of a prefill; two more requests in a batch cost little."""


@dataclass(frozen=True)
class Candidate:
    """A rollout worker that a request could be sent to."""

    name: str
    in_flight: int  # requests of this process
    assigned: int  # trajectories of this process whose newest completion came from it
    policy_version: int


def fresh(candidates: Sequence[Candidate], max_staleness: int) -> list[Candidate]:
    """Return the candidates that are at most `max_staleness` versions behind the newest."""
    newest = max((worker.policy_version for worker in candidates), default=0)
    return [worker for worker in candidates if newest - worker.policy_version <= max_staleness]


def choose(candidates: Sequence[Candidate], former: str, rng: Random) -> str:
    """Return the name of the candidate to ask. There must be at least one.

    `former` is the name of the worker that served this trajectory before, empty if there is none. The number
    of assigned trajectories estimates the coming load, so that a worker that has just joined gets the next
    new trajectories.
    """
    least = min(candidates, key=lambda worker: (worker.in_flight, worker.assigned, rng.random()))
    for worker in candidates:
        if worker.name == former and worker.in_flight <= least.in_flight + AFFINITY:
            return former
    return least.name


logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two checks, by a waiting caller, whether its worker, or any worker, is alive."""
REPEAT_S = 15.0
"""Seconds after which a request is repeated at the same worker. A lost connection is noticed at once; a
request holds megabytes of screenshots and a completion may take long, so that an earlier repeat would only
cost."""
ABSENT_S = 900.0
"""Longest time, in all, that a completion waits while no worker can be asked. The episode keeps its screen
and its lease meanwhile, and is invalid afterwards. A trainer or a host that starts again takes minutes."""

_MAX_TRAJECTORIES = 16_384
_ABSENT = f"no rollout worker is ready: {start('dart rollout')}"


@dataclass
class RoutingStats:
    """Counters of a router."""

    rerouted: int = 0  # requests that went to another worker
    returning: int = 0  # requests of a trajectory that had a former worker
    affine: int = 0  # those of `returning` that went to the former worker again
    resumed: int = 0  # completions that went on after a suspension

    def gauges(self) -> dict[str, float]:
        """Return the gauges `rerouted`, `resumed`, and `affine` (as a share of `returning`)."""
        share = self.affine / self.returning if self.returning else 0.0
        return {
            "rerouted": float(self.rerouted),
            "affine": share,
            "resumed": float(self.resumed),
        }


@dataclass(eq=False)
class _RolloutWorker:
    """A rollout worker to which there is a connection."""

    name: str
    endpoint: str
    requester: Requester
    in_flight: int = 0  # requests of this process
    assigned: int = 0  # trajectories in _served_by


class RolloutRouter:
    """A policy for episodes: all rollout workers of the run behind `act`."""

    def __init__(
        self,
        name: str,
        deadline_s: float,
        *,
        absent_s: float = ABSENT_S,
        curve: CurveKeys | None = None,
        max_staleness: int | None = None,
        dead_after_s: float = REROUTE_AFTER_S,
        waits: WaitReporter | None = None,
    ) -> None:
        """Set the limits; connections are made as heartbeats arrive.

        `name` is this client's name at the workers. `deadline_s` bounds a call of `act` over all workers;
        time in which no worker can be asked does not count towards it, and is bounded by `absent_s`. A worker
        more than `max_staleness` versions behind the newest is avoided (None: no limit).
        """
        self.routed = RoutingStats()
        self._name = name
        self._deadline_s = deadline_s
        self._absent_s = absent_s
        self._curve = curve
        self._max_staleness = max_staleness
        self._waits = waits
        self._heard_at = time.monotonic()  # newest heartbeat of any process
        self._liveness = Liveness(dead_after_s, clock=lambda: self._heard_at)
        self._workers: dict[str, _RolloutWorker] = {}
        # trajectory id -> the worker that served it last; the newest trajectory is last
        self._served_by: OrderedDict[str, _RolloutWorker] = OrderedDict()
        self._chance = Random()  # noqa: S311 - unseeded: no two processes should draw alike
        self._news = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests that wait for their completion."""
        return sum(worker.in_flight for worker in self._workers.values())

    def ready(self) -> list[str]:
        """Return the names of the workers that can be asked: ready ones, else those taking new weights."""
        return [candidate.name for candidate in self._candidates()]

    def observe(self, heartbeat: Heartbeat) -> None:
        """Note a heartbeat.

        One of a rollout worker updates that worker; any other shows that heartbeats arrive.
        """
        self._heard_at = time.monotonic()
        if heartbeat.role != "rollout" or not heartbeat.endpoint:
            return
        self._liveness.observe(heartbeat)
        worker = self._workers.get(heartbeat.worker)
        if worker is None or worker.endpoint != heartbeat.endpoint:
            self._connect(heartbeat)
        self._drop_forgotten()
        self._news.set()

    async def wait_ready(self) -> None:
        """Wait without a deadline until a worker can be asked."""
        if self.ready():
            return
        began = time.monotonic()
        while not self.ready():
            with self._reporting(self.missing(), "rollout", since=began):
                await self._look()

    def missing(self) -> str:
        """Return, in words, what this process waits for before it can ask a worker."""
        alive = self._liveness.alive("rollout")
        if not alive:
            return awaited("rollout")
        first = alive[0]
        its = f"waits for {first.waiting_for}" if first.waiting_for else f"is {first.state}"
        return f"{first.worker} to be ready: it {its}"

    async def act(self, request: ActRequest) -> Completion:
        """Return one whole completion, however often it is suspended for the trainer's turn.

        A suspended completion is not returned: the same request is sent again with its tokens, to any worker,
        which holds it until the turn is over. The last answer has all tokens; its times are the sums over all
        answers. Raises DeadlineError with what this process waited for, and ProtocolError, EngineError and
        others as a worker raised them.
        """
        queue_s = engine_s = 0.0
        while True:
            completion = await self._act_once(request)
            queue_s, engine_s = queue_s + completion.queue_s, engine_s + completion.engine_s
            if completion.stop != "suspended":
                return completion.model_copy(update={"queue_s": queue_s, "engine_s": engine_s})
            sampled = completion.sampled
            self.routed.resumed += len(sampled) > len(request.partial or ())
            partial = sampled if len(sampled) else None
            request = request.model_copy(update={"partial": partial, "pointed": completion.pointed})

    async def _act_once(self, request: ActRequest) -> Completion:
        """Return the answer of one worker; if that worker dies, ask another one."""
        request_id = uuid.uuid4().bytes
        began, absent_s = time.monotonic(), 0.0  # absent_s: time in which no worker could be asked
        where = f"step {request.step} of {request.trajectory_id}"
        last: _RolloutWorker | None = None
        while True:
            pick_began = time.monotonic()
            worker = await self._pick(request.trajectory_id, pick_began + self._absent_s - absent_s)
            absent_s += time.monotonic() - pick_began
            if worker is None:
                raise DeadlineError(f"{where}: after {self._absent_s:g} s {_ABSENT}")
            self.routed.rerouted += last is not None and last is not worker
            deadline = began + self._deadline_s + absent_s
            completion = await self._ask(worker, request, request_id, deadline)
            if completion is not None:
                return completion
            logger.warning("%s: %s is gone, asking another worker", where, worker.name)
            last = worker

    def forget(self, trajectory_id: str) -> None:
        """Forget a trajectory that is over: it is no longer assigned to a worker."""
        former = self._served_by.pop(trajectory_id, None)
        if former is not None:
            former.assigned -= 1

    async def close(self) -> None:
        """Give up the requests in flight and close all connections."""
        self._closed = True
        closing = [worker.requester.close() for worker in self._workers.values()]
        self._workers.clear()
        await asyncio.gather(*closing, *self._closing)

    async def _pick(self, trajectory_id: str, deadline: float) -> _RolloutWorker | None:
        """Return the worker to ask; None if there is none before the deadline. Raises BusError if closed."""
        candidates = self._candidates() or await self._candidates_before(deadline)
        if not candidates:
            return None
        former = self._served_by.get(trajectory_id)
        name = choose(candidates, former.name if former else "", self._chance)
        worker = self._workers[name]
        self.routed.returning += former is not None
        self.routed.affine += former is worker
        self._settle(trajectory_id, worker)
        return worker

    async def _candidates_before(self, deadline: float) -> list[Candidate]:
        """Wait for candidates and return them; [] if there is none before the deadline.

        Raises BusError if the router is closed.
        """
        with self._reporting("a rollout worker to be ready", "rollout"):
            while not (candidates := self._candidates()):
                if self._closed:
                    raise BusError(f"{self._name}: the router is closed")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                await self._look(remaining)
        return candidates

    def _candidates(self) -> list[Candidate]:
        """Return the workers that can be asked, as `choose` sees them."""
        alive = [hb for hb in self._liveness.alive("rollout") if self._is_reachable(hb.worker)]
        for state in ("ready", "syncing"):
            candidates = [self._candidate(hb) for hb in alive if hb.state == state]
            if candidates:
                limit = self._max_staleness
                return candidates if limit is None else fresh(candidates, limit)
        return []

    def _candidate(self, heartbeat: Heartbeat) -> Candidate:
        worker = self._workers[heartbeat.worker]
        return Candidate(worker.name, worker.in_flight, worker.assigned, heartbeat.policy_version)

    def _is_reachable(self, name: str) -> bool:
        """Return True if there is a connection to the worker that is not lost."""
        worker = self._workers.get(name)
        return worker is not None and not worker.requester.lost.is_set()

    def _settle(self, trajectory_id: str, worker: _RolloutWorker) -> None:
        """Note that `worker` serves the trajectory from now on."""
        self.forget(trajectory_id)
        self._served_by[trajectory_id] = worker
        worker.assigned += 1
        while len(self._served_by) > _MAX_TRAJECTORIES:
            self.forget(next(iter(self._served_by)))

    async def _ask(
        self, worker: _RolloutWorker, request: ActRequest, request_id: bytes, deadline: float
    ) -> Completion | None:
        """Return the worker's completion; None if the worker died, stopped or was replaced before it."""
        remaining = max(0.001, deadline - time.monotonic())
        worker.in_flight += 1
        asking = asyncio.create_task(
            worker.requester.request(request, remaining, REPEAT_S, request_id=request_id)
        )
        losing = asyncio.create_task(worker.requester.lost.wait())
        try:
            with self._reporting(f"a completion from {worker.name}", worker.name):
                while not asking.done():
                    await asyncio.wait(
                        [asking, losing], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not asking.done() and (losing.done() or self._is_gone(worker)):
                        return None
            if self._workers.get(worker.name) is not worker and asking.exception():
                return None  # the connection was closed because the worker has another address now
            reply = asking.result()
        finally:
            worker.in_flight -= 1
            asking.cancel()
            losing.cancel()
        assert isinstance(reply, Completion)  # the requester has checked it
        return reply

    def _is_gone(self, worker: _RolloutWorker) -> bool:
        """Return True if the worker is dead, replaced, or stopping while another one is ready.

        The worker was ready when it was asked, so that state `starting` means a new process of the same name.
        That process has not received the request, and may load its model for longer than the request may
        wait.
        """
        heartbeat = self._liveness.get(worker.name)
        if self._workers.get(worker.name) is not worker or heartbeat is None:
            return True
        if self._liveness.silent_s(worker.name) > self._liveness.dead_after_s:
            return True
        return heartbeat.state == "starting" or (
            heartbeat.state == "stopping" and bool(self.ready())
        )

    def _connect(self, heartbeat: Heartbeat) -> None:
        """Connect to the worker of a heartbeat, in place of an older connection under its name."""
        try:
            requester = Requester(
                heartbeat.endpoint, name=self._name, peer="dart rollout", curve=self._curve
            )
        except DartError as error:  # the address is invalid, or not reachable from this host
            logger.error("rollout worker %s cannot be asked: %s", heartbeat.worker, error)
            return
        self._disconnect(heartbeat.worker)
        self._workers[heartbeat.worker] = _RolloutWorker(
            heartbeat.worker, heartbeat.endpoint, requester
        )
        logger.info("rollout worker %s at %s", heartbeat.worker, heartbeat.endpoint)

    def _disconnect(self, name: str) -> None:
        """Forget a worker, and begin to close the connection to it."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            task = asyncio.create_task(worker.requester.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _drop_forgotten(self) -> None:
        """Close the connections to workers that `_liveness` has forgotten, since they died long ago."""
        for name in [name for name in self._workers if self._liveness.get(name) is None]:
            self._disconnect(name)

    async def _look(self, at_most_s: float = LOOK_S) -> None:
        """Wait for a heartbeat, at most `LOOK_S`, since silence and lost connections matter as well."""
        self._news.clear()
        try:
            async with asyncio.timeout(min(LOOK_S, at_most_s)):
                await self._news.wait()
        except TimeoutError:
            return

    def _reporting(
        self, what: str, on: str, since: float | None = None
    ) -> AbstractContextManager[None]:
        return self._waits.waiting(what, on=on, since=since) if self._waits else nullcontext()
