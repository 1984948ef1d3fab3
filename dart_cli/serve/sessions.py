"""The sessions of one process: opened with a lease from the data service, bounded, ended when their agents are gone.

action_language   how the policy of a configuration writes actions
RunPeers          the processes of the run whose tasks are played; a model that is served alone has none
Sessions          the sessions by id; those that are over are remembered for a while, so that a late request is told why

Each session has a slot, as an environment of `dart env` has: the data service knows it by worker and slot.
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
from dart_cli.env.episode import Policy, action_spec_of, slot_timer
from dart_cli.env.router import RolloutRouter
from dart_cli.runtime.waits import as_gauges
from dart_cli.serve.errors import ApiError, invalid, unavailable
from dart_cli.serve.requests import ChatRequest, Opening
from dart_cli.serve.sampling import settle
from dart_cli.serve.session import Session, SessionContext, Terms
from envs.contract.base import Verdict
from envs.contract.registry import find_task

logger = logging.getLogger(__name__)

MOST_REMEMBERED = 10_000
"""Sessions that are over, and still told why."""
MOST_EVALUATED = 1000
"""Steps of a session outside training that names no task."""
LOOK_S = 0.5
"""How often sessions are checked for agents that are gone."""
IDLE_S = 600.0
"""Without a request after which an episode is over, as invalid: its agent is gone."""
LEASE_WAIT_S = 30.0
"""That a request waits for a task to play before it is answered with 503 and the reason."""
NAME = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")


def action_language(config: Config) -> dict[str, str]:
    """Return the action parser and the coordinates in which the policy writes actions."""
    return {"action_parser": config.policy.action_parser, "coordinates": config.policy.coordinates}


@dataclass(frozen=True)
class RunPeers:
    """The processes of the run whose tasks are played, and this worker's name among them."""

    worker: str
    data: DataClient
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
        action_language: Mapping[str, str],
        idle_s: float = IDLE_S,
        lease_wait_s: float = LEASE_WAIT_S,
    ) -> None:
        """`policy` answers all sessions; `action_language` says how it writes actions, for those who read them.

        Without a `run` no session is trained on, and tasks are names alone.
        """
        env, serve = config.env, config.serve
        self._config = config
        self._policy = policy
        self._run = run
        self.action_language = action_language
        self._lease_wait_s = lease_wait_s
        self._context = SessionContext(
            data=run.data if run else None,
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
        self._over: OrderedDict[str, tuple[str, Session]] = OrderedDict()  # id -> why, and it
        self._counts: Counter[str] = Counter()  # of ended sessions, by outcome
        self._steps = 0  # of ended sessions
        self.refused = 0  # requests
        self.stopping = ""  # why no session is opened any more

    def __len__(self) -> int:
        return len(self._open)

    @property
    def are_alone(self) -> bool:
        """Return True if a model is served without a run: a request needs no session then."""
        return self._run is None

    def all(self) -> list[Session]:
        """Return the open sessions, oldest first."""
        return list(self._open.values())

    def get(self, name: str) -> Session:
        """Return the open session of that id. Raises ApiError."""
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
        """Return the session that gets this verdict, also where it has it already. Raises ApiError."""
        over = self._over.get(name)
        return over[1] if over is not None and over[1].verdict == verdict else self.get(name)

    async def obtain(self, name: str, opening: Opening) -> Session:
        """Return the session of that id, opened if it is new. Raises ApiError."""
        if name in self._over or name in self._open:
            session = self.get(name)
            task = session.terms.task_id
            if opening.task not in ("", task):
                raise invalid(f"session {name} plays {task!r}, not {opening.task!r}", "task")
            return session
        return await self.open(opening, name)

    def check(self, name: str, opening: Opening, request: ChatRequest) -> None:
        """Raise ApiError for settings of a first request that would be refused, before a task is leased for it."""
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
        """Return a new session, under its own id if it has none yet. Raises ApiError."""
        if name and not NAME.fullmatch(name):
            raise invalid(
                f"session {name[:40]!r}: an id has 1 to 128 letters, digits and . _ : @ + -",
                "session",
            )
        if self.stopping:
            raise unavailable(self.stopping, "stopping")
        if (known := self._opening.get(name)) is None:
            if not self._free:
                raise ApiError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too_many_sessions",
                    f"serve.sessions = {self._config.serve.sessions} are open; end one, or raise that",
                    retry_after_s=5.0,
                )
            key = name or secrets.token_hex(8)
            known = asyncio.create_task(self._start(self._free.pop(), opening, name))
            self._opening[key] = known
            known.add_done_callback(lambda _: self._opening.pop(key, None))
        # A client that is gone must not lose the lease for the session: it is ended when it stays idle.
        return await asyncio.shield(known)

    async def _start(self, slot: int, opening: Opening, name: str) -> Session:
        try:
            if opening.train and self._run is not None:
                terms = await self._leased(self._run, slot, opening, name)
            else:
                terms = self._evaluated(opening, name)
        except BaseException:
            self._free.append(slot)
            raise
        session = Session(terms, slot, self._policy, self._context, self._timers[slot], self._ended)
        self._open[terms.id] = session
        if self.stopping:
            await session.give_back(self.stopping)
            raise unavailable(self.stopping, "stopping")
        return session

    async def _leased(self, run: RunPeers, slot: int, opening: Opening, name: str) -> Terms:
        """Return the terms of a task that the data service leases. Raises ApiError."""
        request = LeaseRequest(
            worker=run.worker,
            slot=slot,
            suites=[self._config.env.suite],
            started_at=run.heartbeat.started_at,
            task=opening.task,
            task_seed=opening.seed,
        )
        wait_s = self._lease_wait_s
        try:  # no task is leased that cannot be played
            async with asyncio.timeout(wait_s):
                await run.router.wait_ready()
        except TimeoutError:
            text = f"waited {wait_s:g} s for {run.router.missing()}"
            raise unavailable(text, "no_rollout") from None
        try:
            lease = await run.data.lease(request, wait_s)
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

    def _evaluated(self, opening: Opening, name: str) -> Terms:
        """Return the terms of a session outside training, of which nothing is filed. Raises TaskError.

        A model that is served alone knows no suite, and draws anew where an agent names no seed.
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
        """End the sessions whose agents are gone, until cancelled."""
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
        reason = f"no request for {self._context.idle_s:g} s"
        logger.warning("session %s is over: %s", session.terms.id, reason)
        self.count("invalid")
        try:
            await session.end(Verdict("invalid", reason), "environment")
        except DartError as error:
            logger.warning("session %s: %s", session.terms.id, error)

    async def give_back(self, reason: str) -> None:
        """End all sessions and return their leases; no other is opened."""
        self.stopping = reason
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*(each.give_back(reason) for each in self.all()))

    def _ended(self, session: Session, reason: str) -> None:
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
        """For the heartbeat: what is open, and the leases in play."""
        opened = self.all()
        gauges = {
            "slots": float(len(self._timers)),
            "playing": float(len(opened)),
            "idle": float(len(self._free)),
            "waiting_model": float(sum(each.state == "asking" for each in opened)),
            "episodes": float(self._counts.total()),
            "passed": float(self._counts["pass"]),
            "invalid": float(self._counts["invalid"]),
            "steps": float(self._steps + sum(each.steps for each in opened)),
            "refused": float(self.refused),
            **as_gauges(self._timers),
        }
        if self._run is not None:
            gauges |= self._run.data.leases.gauges() | self._run.router.routed.gauges()
        leases = [each.terms.trajectory_id for each in opened if each.terms.lease is not None]
        state = "stopping" if self.stopping else "ready" if opened else "waiting"
        return Load(state, gauges=gauges, trajectories=leases)
