"""`dart env`: slots that lease a task, play it, submit the trajectory, and repeat.

    run               the process: connections, heartbeat and slots, until it is stopped or the run is over
    EnvSlot           one environment, and the loop that leases a task, plays it and submits the trajectory
    DataClient        requests to the data service: leases, steps, ends (data_client.py)
    RolloutRouter     requests to rollout workers                       (router.py)
    connected         the connections, and the messages that arrive     (peers.py)
    EpisodeCounters   counts of the slots' episodes, for the heartbeat
    WorkerContext     the parts that all slots of the process share

The process does not end because another one is absent: without a data service or rollout workers the slots
wait, report the wait in heartbeats, and continue when these appear. It ends with an error if too many of its
environments hang, since only that frees their threads (`raise_if_stuck`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from bus.errors import DartError, UserError
from bus.heartbeat import HeartbeatSender, Load
from bus.messages import Lease, LeaseRequest, TrajectoryEnd
from dart_cli.config.schema import Config
from dart_cli.env.async_env import QUEUEING, make_async_env
from dart_cli.env.carriers import stuck
from dart_cli.env.data_client import DataClient
from dart_cli.env.episode import BROKE, Episode, slot_timer
from dart_cli.env.peers import connected
from dart_cli.env.router import RolloutRouter
from dart_cli.env.step_prompts import ActionSpec, action_spec_of
from dart_cli.runtime.waits import as_gauges
from envs.contract.registry import find_task

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds of pause after the first, second, ... failed episode in a row."""
STUCK_SHARE = 0.5
"""Share of the slots that may be stuck, which lease nothing more. Above it the process ends, and the episodes
that it plays are played again."""
LOOK_S = 1.0
"""Seconds between two checks for stuck slots."""


async def run(config: Config, worker: str, slots: int, stop: asyncio.Event) -> None:
    """Play in `slots` environments until `stop` is set or the data service reports that the run is over."""
    action_spec = action_spec_of(config)
    counters = EpisodeCounters()

    def load() -> Load:
        return counters.load(context, playing)

    async with connected(config, worker, "env", load) as peers:
        heartbeat = peers.heartbeat
        context = WorkerContext(
            worker, config, action_spec, peers.data_service, peers.router, heartbeat, counters
        )
        playing = [EnvSlot(index, context) for index in range(slots)]
        async with heartbeat:
            tasks = [asyncio.create_task(peers.listen(), name="telemetry")]
            tasks += [
                asyncio.create_task(slot.run(), name=f"slot-{slot.index}") for slot in playing
            ]
            tasks.append(asyncio.create_task(raise_if_stuck(worker, playing), name="stuck"))
            ends = [asyncio.create_task(event.wait()) for event in (stop, peers.over)]
            try:
                await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if stop.is_set() or peers.over.is_set():  # not if an error ends the process
                    counters.state = "stopping"
                    heartbeat.beat()
                stop.set()  # the time that the process may take to end begins here
                for task in (*tasks, *ends):
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(slot.close() for slot in playing))
    for result in results:
        # A slot ends by itself only because of an error that no retry can fix.
        if isinstance(result, Exception):
            raise result


async def raise_if_stuck(worker: str, slots: list[EnvSlot]) -> None:
    """Raise EnvError as soon as more than STUCK_SHARE of the slots can make no more environments."""
    while sum(slot.is_stuck for slot in slots) <= STUCK_SHARE * len(slots):  # noqa: ASYNC110 - of threads
        await asyncio.sleep(LOOK_S)
    raise stuck(f"most slots of {worker}, e.g. {next(s.name for s in slots if s.is_stuck)}")


# --- slots ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerContext:
    """The parts that all slots of a process share."""

    worker: str
    config: Config
    action_spec: ActionSpec
    data_service: DataClient
    router: RolloutRouter
    heartbeat: HeartbeatSender
    counters: EpisodeCounters


@dataclass
class EpisodeCounters:
    """Counts of the episodes that the slots of this process have played."""

    state: str = ""  # of the process; if empty, it is derived from the slots
    episodes: Counter[str] = field(default_factory=Counter)  # by outcome
    steps: int = 0
    lost: int = 0  # leases that the data service took back

    def note(self, episode: Episode, outcome: str) -> None:
        """Count an episode that is over."""
        self.episodes[outcome] += 1
        self.steps += episode.steps
        self.lost += episode.lease_lost

    def load(self, context: WorkerContext, slots: list[EnvSlot]) -> Load:
        """Return the load for the heartbeat: what the slots do, their time by phase, and their leases."""
        episodes = [slot.episode for slot in slots if slot.episode is not None]
        queueing = [slot for slot in slots if slot.timer.phase == QUEUEING]
        phases = Counter(
            slot.episode.phase for slot in slots if slot.episode and slot not in queueing
        )
        gauges = {
            "slots": float(len(slots)),
            "playing": float(len(episodes)),
            "idle": float(len(slots) - len(episodes)),
            "queueing": float(len(queueing)),
            "resetting": float(phases["reset"]),
            "waiting_model": float(phases["model"]),
            "stepping": float(phases["env"]),
            "submitting": float(phases["submit"]),
            "episodes": float(self.episodes.total()),
            "passed": float(self.episodes["pass"]),
            "invalid": float(self.episodes["invalid"]),
            "leases_lost": float(self.lost),
            "restarts": float(sum(slot.restarts for slot in slots)),
            "hung": float(sum(slot.hung for slot in slots)),
            "steps": float(self.steps + sum(episode.steps for episode in episodes)),
            **context.data_service.leases.gauges(),
            **context.router.routed.gauges(),
            **as_gauges(slot.timer for slot in slots),
        }
        state = self.state or ("ready" if episodes else "waiting")
        trajectories = [episode.lease.trajectory_id for episode in episodes]
        return Load(state, gauges=gauges, trajectories=trajectories)


class EnvSlot:
    """One environment and the loop that plays in it."""

    def __init__(self, index: int, context: WorkerContext) -> None:
        env = context.config.env
        self.index = index
        self.episode: Episode | None = None  # in play
        self.timer = slot_timer()
        self._context = context
        self._request = LeaseRequest(
            worker=context.worker,
            slot=index,
            suites=[env.suite],
            started_at=context.heartbeat.started_at,
        )
        self.name = f"{context.worker}/{index}"
        self._env = make_async_env(env, self.name, context.heartbeat, self.timer)
        self.restarts = 0  # how often the environment was replaced because it broke
        self._consecutive_failures = 0  # episodes in a row

    @property
    def hung(self) -> int:
        """The number of environments of this slot that overran a deadline and have not returned yet."""
        return self._env.hung

    @property
    def is_stuck(self) -> bool:
        """Whether so many environments of this slot hang that it can make no more."""
        return self._env.is_stuck

    async def run(self) -> None:
        """Lease a task, play it, submit the trajectory; repeat until cancelled.

        Raises UserError if the data service or the suite finds an error that no retry can fix.
        """
        while True:
            if self.is_stuck:
                await self._until_freed()
            self.timer.enter("idle")
            await self._context.router.wait_ready()
            try:
                await self._play(await self._context.data_service.lease(self._request))
            except UserError:
                raise
            except DartError as error:
                logger.error("slot %d: the data service refused: %s", self.index, error)
                await self._back_off()

    async def close(self) -> None:
        """Close the environment."""
        await self._env.close()

    async def _play(self, lease: Lease) -> None:
        """Play one lease, and pause if its episode is invalid. The lease is returned if this is cancelled."""
        context, task = self._context, find_task(lease.suite, lease.task_id)
        hints, share = context.config.teacher.hints, context.config.train.teacher_weight
        episode = Episode(
            self._env,
            lease,
            task,
            policy=context.router,
            sink=context.data_service,
            action_spec=context.action_spec,
            timer=self.timer,
            hints=hints and share > 0,
        )
        self.episode = episode
        outcome = "invalid"
        try:
            end = await episode.play()
            if not episode.lease_lost:
                outcome = end.outcome
        except asyncio.CancelledError:
            end = episode.cancelled("the environment process was stopped")
            await context.data_service.give_back(end)
            raise
        finally:
            self.episode = None
            context.router.forget(lease.trajectory_id)
            context.counters.note(episode, outcome)
        if end.outcome != "invalid":
            self._consecutive_failures = 0
            await self._renew_if_broken(end)
        elif episode.lease_lost and episode.steps > 1:  # the environment worked: no failure
            logger.info("%s (%s): %s", lease.trajectory_id, task.id, end.reason)
        else:
            logger.error("%s (%s) is invalid: %s", lease.trajectory_id, task.id, end.reason)
            self.timer.enter("dead")
            await self._renew_if_broken(end)
            await self._back_off()

    async def _renew_if_broken(self, end: TrajectoryEnd) -> None:
        if end.stop_reason in BROKE:
            self.restarts += 1
            await self._env.renew()

    async def _until_freed(self) -> None:
        """Wait until an environment that hangs returns, if one ever does. Nothing is leased meanwhile."""
        self.timer.enter("dead")
        logger.error("slot %d leases nothing more: %s", self.index, stuck(self.name))
        with self._context.heartbeat.waiting(f"an environment of {self.name} to return"):
            while self.is_stuck:  # noqa: ASYNC110 - of threads
                await asyncio.sleep(LOOK_S)

    async def _back_off(self) -> None:
        """Pause after a failure, the longer the more episodes have failed in a row."""
        self.timer.enter("dead")
        pause_s = BACK_OFF_S[min(self._consecutive_failures, len(BACK_OFF_S) - 1)]
        self._consecutive_failures += 1
        if not pause_s:
            return
        what = (
            f"the pause of slot {self.index}, {self._consecutive_failures} failed episodes in a row"
        )
        with self._context.heartbeat.waiting(what, pause_s):
            await asyncio.sleep(pause_s)
