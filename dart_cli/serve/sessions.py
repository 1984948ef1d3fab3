"""The sessions of one process: they are opened with a lease, bounded, and ended when their agents are gone.

action_language   returns how the policy of a configuration writes actions
RunPeers          the processes of the run whose tasks are played; a model that is served without a run has
                  none
Sessions          the sessions by id; those that are over stay for a while, so that a late request gets the
                  reason

Each session has a slot, like an environment of `dart env`: the data service identifies it by worker and slot.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from bus.errors import DartError, DeadlineError
from bus.heartbeat import HeartbeatSender, Load
from bus.messages import LeaseRequest, Sampling
from dart_cli.config import endpoints
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.env.data_client import DataClient
from dart_cli.env.episode import Policy, slot_timer
from dart_cli.env.router import RolloutRouter
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.runtime.waits import as_gauges
from dart_cli.serve.errors import ApiError, invalid, unavailable
from dart_cli.serve.requests import ChatRequest, Opening
from dart_cli.serve.sampling import settle
from dart_cli.serve.session import Session, SessionContext, Terms
from envs.contract.base import Verdict
from envs.contract.registry import find_task

logger = logging.getLogger(__name__)

MOST_REMEMBERED = 10_000
"""Most sessions that are over and whose reason is still kept."""
MOST_EVALUATED = 1000
"""Step limit of a session outside training that names no task."""
LOOK_S = 0.5
"""Seconds between two checks for sessions whose agent is gone."""
IDLE_S = 600.0
"""Seconds without a request after which an episode ends as invalid, since its agent is gone."""
LEASE_WAIT_S = 30.0
"""Seconds that a request waits for a lease before it is answered with 503 and the reason."""
NAME = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")


def action_language(config: Config) -> dict[str, str | int]:
    """Return the action parser and the coordinates in which the policy writes actions, and how many at once."""
    policy = config.policy
    language: dict[str, str | int] = {
        "action_parser": policy.action_parser,
        "coordinates": policy.coordinates,
    }
    if policy.max_actions > 1:
        language["max_actions"] = policy.max_actions
    return language


@dataclass(frozen=True)
class RunPeers:
    """The processes of the run whose tasks are played, and this worker's name among them."""

    worker: str
    data_service: DataClient
    router: RolloutRouter
    heartbeat: HeartbeatSender


class Sessions:
    """The open sessions of a process. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        run: RunPeers | None,
        *,
        action_language: Mapping[str, str | int],
        idle_s: float = IDLE_S,
        lease_wait_s: float = LEASE_WAIT_S,
    ) -> None:
        """Let `policy` answer all sessions.

        Answers carry `action_language`, which describes how the policy writes actions. Without a `run`, no
        session is trained on, and a task is only a name.
        """
        env, serve = config.env, config.serve
        self._config = config
        self._policy = policy
        self._run = run
        self.action_language = action_language
        self._lease_wait_s = lease_wait_s
        self._context = SessionContext(
            data_service=run.data_service if run else None,
            action_spec=action_spec_of(config),
            screens=env.screenshots,
            ignores_sampling=serve.sampling == "ignore",
            patience_s=endpoints.DEADLINE_S,
            idle_s=idle_s,
            waits=run.heartbeat if run else None,
        )
        self._timers = [slot_timer() for _ in range(serve.sessions)]
        self._free = list(range(serve.sessions))[::-1]
        self._open: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._over: OrderedDict[str, tuple[str, Session]] = OrderedDict()  # id -> (reason, session)
        self._counts: Counter[str] = Counter()  # of sessions that are over, by outcome
        self._steps = 0  # of sessions that are over
        self.refused = 0  # number of requests
        self.stopping = ""  # why no session is opened any more; empty while sessions are opened

    def __len__(self) -> int:
        return len(self._open)

    @property
    def are_alone(self) -> bool:
        """Whether a model is served without a run, so that a request needs no session."""
        return self._run is None

    def all(self) -> list[Session]:
        """Return the open sessions, oldest first."""
        return list(self._open.values())

    def get(self, name: str) -> Session:
        """Return the open session with the id `name`. Raises ApiError."""
        if (session := self._open.get(name)) is not None:
            return session
        if (over := self._over.get(name)) is not None:
            raise ApiError(
                HTTPStatus.GONE,
                "session_over",
                f"session {name} is over: {over[0]}; an episode has one id, take another for the next",
            )
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            "no_session",
            f"no session {name!r}; POST /v1/sessions opens one",
        )

    def to_end(self, name: str, verdict: Verdict) -> Session:
        """Return the session that this verdict is for, even if it has the verdict already.

        Raises ApiError.
        """
        over = self._over.get(name)
        return over[1] if over is not None and over[1].verdict == verdict else self.get(name)

    async def obtain(self, name: str, opening: Opening) -> Session:
        """Return the session with the id `name`; open it if it is new. Raises ApiError."""
        if name in self._over or name in self._open:
            session = self.get(name)
            task = session.terms.task_id
            if opening.task not in ("", task):
                raise invalid(f"session {name} plays {task!r}, not {opening.task!r}", "task")
            return session
        return await self.open(opening, name)

    def check(self, name: str, opening: Opening, request: ChatRequest) -> None:
        """Raise ApiError if a first request has wrong settings, before a task is leased for its session."""
        if name not in self._open:
            settle(
                request.fields,
                self._sampling(0),
                is_trained=self._trains(opening),
                ignores=self._context.ignores_sampling,
            )

    def _trains(self, opening: Opening) -> bool:
        return opening.train and self._run is not None

    def _sampling(self, seed: int) -> Sampling:
        rollout = self._config.rollout
        return Sampling(temperature=rollout.temperature, max_tokens=rollout.max_tokens, seed=seed)

    async def open(self, opening: Opening, name: str = "") -> Session:
        """Open a session and return it; without a `name` dart chooses its id. Raises ApiError."""
        if name and not NAME.fullmatch(name):
            raise invalid(
                f"session {name[:40]!r}: an id has 1 to 128 letters, digits and . _ : @ + -",
                "session",
            )
        if self.stopping:
            raise unavailable(self.stopping, "stopping")
        if (opening_task := self._opening.get(name)) is None:
            if not self._free:
                raise ApiError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too_many_sessions",
                    f"serve.sessions = {self._config.serve.sessions} are open; end one, or raise that",
                    retry_after_s=5.0,
                )
            key = name or secrets.token_hex(8)
            opening_task = asyncio.create_task(self._start(self._free.pop(), opening, name))
            self._opening[key] = opening_task
            opening_task.add_done_callback(lambda _: self._opening.pop(key, None))
        # A client may go away meanwhile. The session still opens, and ends after IDLE_S, so that its lease is
        # returned.
        return await asyncio.shield(opening_task)

    async def _start(self, slot: int, opening: Opening, name: str) -> Session:
        """Open a session in a slot, with a lease if it is trained on; free the slot if that fails."""
        try:
            if opening.train and self._run is not None:
                terms = await self._terms_of_lease(self._run, slot, opening, name)
            else:
                terms = self._terms_outside_training(opening, name)
        except BaseException:
            self._free.append(slot)
            raise
        session = Session(
            terms, slot, self._policy, self._context, self._timers[slot], self._note_end
        )
        self._open[terms.id] = session
        if self.stopping:
            await session.give_back(self.stopping)
            raise unavailable(self.stopping, "stopping")
        return session

    async def _terms_of_lease(self, run: RunPeers, slot: int, opening: Opening, name: str) -> Terms:
        """Lease a task and return the terms of its session. Raises ApiError."""
        request = LeaseRequest(
            worker=run.worker,
            slot=slot,
            suites=[self._config.env.suite],
            started_at=run.heartbeat.started_at,
            task=opening.task,
            task_seed=opening.seed,
        )
        wait_s = self._lease_wait_s
        # Without a rollout worker a task could not be played, so that none is leased.
        try:
            async with asyncio.timeout(wait_s):
                await run.router.wait_ready()
        except TimeoutError:
            text = f"waited {wait_s:g} s for {run.router.missing()}"
            raise unavailable(text, "no_rollout") from None
        try:
            lease = await run.data_service.lease(request, wait_s)
        except DeadlineError as error:
            raise unavailable(f"no task to play: {error}", "no_lease") from None
        task = find_task(lease.suite, lease.task_id)
        return Terms(
            id=name or lease.trajectory_id,
            trajectory_id=lease.trajectory_id,
            task_id=lease.task_id,
            task_seed=lease.task_seed,
            instruction=task.instruction,
            max_steps=lease.max_steps,
            sampling=lease.sampling,
            lease=lease,
        )

    def _terms_outside_training(self, opening: Opening, name: str) -> Terms:
        """Return the terms of a session outside training, of which nothing is stored. Raises TaskError.

        A model that is served without a run has no suite, and a random seed if the agent names none.
        """
        config = self._config
        is_of_suite = opening.task and self._run is not None
        task = find_task(config.env.suite, opening.task) if is_of_suite else None
        seed = TRAIN_SEEDS if opening.seed is None else opening.seed
        if self._run is None and opening.seed is None:
            seed = secrets.randbits(62)
        draws = random.Random(f"{config.run.seed}:{opening.task}:{seed}")  # noqa: S311 - no secret
        key = f"eval-{secrets.token_hex(8)}"
        return Terms(
            id=name or key,
            trajectory_id=key,
            task_id=opening.task,
            task_seed=seed,
            instruction=task.instruction if task else "",
            max_steps=task.max_steps if task else MOST_EVALUATED,
            sampling=self._sampling(draws.getrandbits(30)),
            lease=None,
        )

    def count(self, outcome: str) -> None:
        """Count a session that ended with this outcome."""
        self._counts[outcome] += 1

    async def watch(self) -> None:
        """End the sessions whose agents are gone, again and again until cancelled."""
        ending: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for session in self.all():
                if session.state == "open" and now - session.touched_at > self._context.idle_s:
                    task = asyncio.create_task(self._end_idle(session))
                    ending.add(task)
                    task.add_done_callback(ending.discard)

    async def _end_idle(self, session: Session) -> None:
        """End a session whose agent is gone, as invalid."""
        reason = f"no request for {self._context.idle_s:g} s"
        logger.warning("session %s is over: %s", session.terms.id, reason)
        self.count("invalid")
        try:
            await session.end(Verdict("invalid", reason), "environment")
        except DartError as error:
            logger.warning("session %s: %s", session.terms.id, error)

    async def give_back(self, reason: str) -> None:
        """End all sessions and return their leases; no session is opened afterwards."""
        self.stopping = reason
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*(session.give_back(reason) for session in self.all()))

    def _note_end(self, session: Session, reason: str) -> None:
        """Free the slot of a session that takes no more requests, and keep the reason for late ones."""
        terms = session.terms
        if self._open.pop(terms.id, None) is None:
            return
        self._free.append(session.slot)
        self._steps += session.steps
        if self._run is not None:
            self._run.router.forget(terms.trajectory_id)
        self._over[terms.id] = (reason, session)
        while len(self._over) > MOST_REMEMBERED:
            self._over.popitem(last=False)

    def load(self) -> Load:
        """Return the load for the heartbeat: the open sessions, and the leases that they play."""
        sessions = self.all()
        gauges = {
            "slots": float(len(self._timers)),
            "playing": float(len(sessions)),
            "idle": float(len(self._free)),
            "waiting_model": float(sum(session.state == "asking" for session in sessions)),
            "episodes": float(self._counts.total()),
            "passed": float(self._counts["pass"]),
            "invalid": float(self._counts["invalid"]),
            "steps": float(self._steps + sum(session.steps for session in sessions)),
            "refused": float(self.refused),
            **as_gauges(self._timers),
        }
        if self._run is not None:
            gauges |= self._run.data_service.leases.gauges() | self._run.router.routed.gauges()
        leases = [
            session.terms.trajectory_id for session in sessions if session.terms.lease is not None
        ]
        state = "stopping" if self.stopping else "ready" if sessions else "waiting"
        return Load(state, gauges=gauges, trajectories=leases)
