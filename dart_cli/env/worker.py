"""`dart env`: slots that lease a task, play it, hand the trajectory in, and begin again.

    run       the process: connections, heartbeat, slots; returns when stopped or the run is over
    Slot      one environment and its endless loop
    DataLink  leases from data and hands in to it, however long data is away
    Tally     what all slots have done so far, for the heartbeat

Nothing here ends because another process is away: without data or rollout workers the slots wait,
say so in their heartbeats, and go on when these appear.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.errors import DartError, DeadlineError, UserError
from bus.heartbeat import HeartbeatSender, Load
from bus.messages import (
    Ack,
    Heartbeat,
    Lease,
    LeaseReply,
    LeaseRequest,
    Reply,
    Request,
    RunState,
    StepRecord,
    TrajectoryEnd,
)
from bus.sockets import Publisher, Requester, Subscriber
from dart_cli.config import Config, run_curve, run_endpoints
from dart_cli.env.episode import Conventions, Episode, conventions_of
from dart_cli.env.router import RolloutRouter
from dart_cli.env.threaded import ThreadedEnv
from envs.registry import find_task, make_env

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

GIVE_BACK_S = 2.0
"""Seconds a stopping process takes to tell data which leases it drops; else they expire."""

LEAST_PAUSE_S = 0.02
"""Between two questions for a lease, whatever data says."""

BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses after a first, second, ... episode in a row that came to nothing."""


async def run(config: Config, worker: str, slots: int, stop: asyncio.Event) -> None:
    """Play in `slots` environments until `stop` is set or data says that the run is over."""
    endpoints, curve = run_endpoints(config), run_curve(config)
    conventions = conventions_of(config)
    over = asyncio.Event()
    tally = Tally()
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(
            Publisher(endpoints.address(TELEMETRY_IN), curve=curve)
        )
        subscriber = await stack.enter_async_context(
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat, RunState], curve=curve)
        )
        requester = await stack.enter_async_context(
            Requester(endpoints.address(DATA), name=worker, peer="dart data", curve=curve)
        )
        heart = HeartbeatSender(publisher, "env", worker, lambda: tally.load(playing))
        router = RolloutRouter(worker, config.rollout.deadline_s, curve=curve, waits=heart)
        stack.push_async_callback(router.close)
        data = DataLink(requester, config.bus.deadline_s, heart)
        playing = [
            Slot(index, worker, config, conventions, data, router, tally) for index in range(slots)
        ]
        await stack.enter_async_context(heart)
        tasks = [asyncio.create_task(_listen(subscriber, router, over))]
        tasks += [asyncio.create_task(slot.run(), name=f"slot-{slot.index}") for slot in playing]
        ends = [asyncio.create_task(event.wait()) for event in (stop, over)]
        try:
            await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tally.state = "stopping"
            heart.beat()
            for task in (*tasks, *ends):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(slot.close() for slot in playing))
    for result in results:
        # A slot ends by itself only for a mistake that no retry mends.
        if isinstance(result, Exception):
            raise result


async def _listen(subscriber: Subscriber, router: RolloutRouter, over: asyncio.Event) -> None:
    async for message in subscriber:
        if isinstance(message, Heartbeat):
            router.observe(message)
        elif isinstance(message, RunState) and message.stopping:
            logger.info("the run is over: %s", message.reason)
            over.set()


# --- slots ----------------------------------------------------------------------------------


@dataclass
class Tally:
    """What the slots of this process have done; seconds are summed over slots."""

    state: str = ""  # empty: told by the slots
    episodes: Counter[str] = field(default_factory=Counter)  # by outcome
    steps: int = 0
    reset_s: float = 0.0
    model_s: float = 0.0
    env_s: float = 0.0

    def note(self, episode: Episode, outcome: str) -> None:
        """Count an episode that is over."""
        self.episodes[outcome] += 1
        self.steps += episode.steps
        self.reset_s += episode.reset_s
        self.model_s += episode.model_s
        self.env_s += episode.env_s

    def load(self, slots: list[Slot]) -> Load:
        """For the heartbeat: what the slots are at, and the leases in play."""
        episodes = [slot.episode for slot in slots if slot.episode is not None]
        phases = Counter(episode.phase for episode in episodes)
        gauges = {
            "slots": float(len(slots)),
            "playing": float(len(episodes)),
            "idle": float(len(slots) - len(episodes)),
            "resetting": float(phases["reset"]),
            "waiting_model": float(phases["model"]),
            "stepping": float(phases["env"]),
            "handing_in": float(phases["hand_in"]),
            "episodes": float(self.episodes.total()),
            "passed": float(self.episodes["pass"]),
            "invalid": float(self.episodes["invalid"]),
            "steps": float(self.steps + sum(episode.steps for episode in episodes)),
            "reset_s": self.reset_s + sum(episode.reset_s for episode in episodes),
            "model_s": self.model_s + sum(episode.model_s for episode in episodes),
            "env_s": self.env_s + sum(episode.env_s for episode in episodes),
        }
        state = self.state or ("ready" if episodes else "waiting")
        return Load(
            state, gauges=gauges, trajectories=[each.lease.trajectory_id for each in episodes]
        )


class Slot:
    """One environment, played without end."""

    def __init__(
        self,
        index: int,
        worker: str,
        config: Config,
        conventions: Conventions,
        data: DataLink,
        router: RolloutRouter,
        tally: Tally,
    ) -> None:
        self.index = index
        self.episode: Episode | None = None  # in play
        self._request = LeaseRequest(worker=worker, slot=index, suites=[config.env.suite])
        self._conventions = conventions
        self._data = data
        self._router = router
        self._tally = tally
        self._env = ThreadedEnv(
            lambda: make_env(config.env.suite, **config.env.options),
            name=f"{worker}/{index}",
            reset_deadline_s=config.env.reset_deadline_s,
            step_deadline_s=config.env.step_deadline_s,
        )
        self._spoilt = 0  # episodes in a row

    async def run(self) -> None:
        """Lease a task, play it, hand the trajectory in; repeat until cancelled.

        Raises UserError where data or the suite finds a mistake that no retry mends.
        """
        while True:
            await self._router.wait_ready()
            try:
                await self._play(await self._data.lease(self._request))
            except UserError:
                raise
            except DartError as error:
                logger.error("slot %d: data refused: %s", self.index, error)
                await self._back_off()

    async def close(self) -> None:
        """Close the environment."""
        await self._env.close()

    async def _play(self, lease: Lease) -> None:
        task = find_task(lease.suite, lease.task_id)
        episode = Episode(self._env, lease, task, self._router, self._data, self._conventions)
        self.episode = episode
        outcome = "invalid"
        try:
            end = await episode.play()
            outcome = end.outcome
        except asyncio.CancelledError:
            await self._data.give_back(episode.cancelled("the env process was stopped"))
            raise
        finally:
            self.episode = None
            self._tally.note(episode, outcome)
        if end.stop_reason in ("environment", "cancelled"):
            logger.error("%s (%s) is invalid: %s", end.trajectory_id, task.id, end.reason)
            if end.stop_reason == "environment":
                await self._env.renew()
            await self._back_off()
        else:
            self._spoilt = 0

    async def _back_off(self) -> None:
        pause_s = BACK_OFF_S[min(self._spoilt, len(BACK_OFF_S) - 1)]
        self._spoilt += 1
        await asyncio.sleep(pause_s)


class DataLink:
    """Leases and hand-ins. Data may be away for any time: its absence is told and waited out."""

    def __init__(self, requester: Requester, deadline_s: float, heart: HeartbeatSender) -> None:
        self._requester = requester
        self._deadline_s = deadline_s
        self._heart = heart

    async def lease(self, request: LeaseRequest) -> Lease:
        """A task to play, whenever there is one; the heartbeat tells why there is none."""
        since, what = time.monotonic(), "a lease from data"
        while True:
            reply = await self._insist(request, what, since)
            assert isinstance(reply, LeaseReply)
            if reply.lease is not None:
                return reply.lease
            what = f"a lease from data: {reply.reason}"
            pause_s = max(reply.retry_after_s, LEAST_PAUSE_S)
            await self._told(asyncio.sleep(pause_s), what, since)

    async def step(self, record: StepRecord) -> Ack:
        """Hand a step in; returns when data has it."""
        return await self._hand_in(record)

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Hand the end in; returns when data has it."""
        return await self._hand_in(end)

    async def give_back(self, end: TrajectoryEnd) -> None:
        """Tell data that a lease is dropped, if it hears it soon; else the lease expires."""
        try:
            await self._requester.request(end, GIVE_BACK_S)
        except DartError as error:
            logger.warning("%s not given back: %s", end.trajectory_id, error)

    async def _hand_in(self, request: StepRecord | TrajectoryEnd) -> Ack:
        what = f"data to take {request.trajectory_id}"
        reply = await self._insist(request, what, time.monotonic())
        assert isinstance(reply, Ack)
        return reply

    async def _insist(self, request: Request, what: str, since: float) -> Reply:
        """Ask until there is an answer, always with the same id."""
        request_id = uuid.uuid4().bytes
        while True:
            asking = self._requester.request(request, self._deadline_s, request_id=request_id)
            try:
                return await self._told(asking, what, since)
            except DeadlineError as error:
                logger.warning("%s; asking again", error)

    async def _told(self, wait: Awaitable[_T], what: str, since: float) -> _T:
        with self._heart.waiting(what, since=since):
            return await wait
