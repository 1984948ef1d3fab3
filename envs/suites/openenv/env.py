"""Suite `openenv:PROFILE`: tasks of a profile, played in sessions at OpenEnv servers.

OpenenvEnv     plays them in one session
OpenenvSuite   the tasks of one profile

A session is kept over episodes: a reset begins anew in it. Where its server restarted, the next reset finds
another server, or the same once it answers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from bus.errors import EnvError, MissingPartError, first_line
from envs.contract.actions import Action, Answer, Done, Fail, Wait
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.options import Megabytes, Pause, Seconds, checked
from envs.suites.openenv.profile import Profile, RewardTable, at, read_profile
from envs.suites.openenv.session import (
    CapacityError,
    ClosedError,
    Reply,
    Session,
    import_websockets,
)
from envs.tools.remote.images import from_numbers, from_text
from envs.tools.remote.servers import (
    Access,
    Address,
    Retry,
    SharedServers,
    UnreachableError,
    excerpt,
    read_access,
    read_addresses,
)

MOST_SEED = 1 << 31  # environments hand it to generators that take 32 bits


@dataclass(frozen=True)
class Limits:
    """Seconds and sizes of one environment's requests."""

    reset_s: float
    step_s: float
    connect_s: float  # to wait for a server that is down or full
    reply_mb: float


class OpenenvEnv:
    """Plays the tasks of one profile. See envs.contract.base.GuiEnv for the contract."""

    def __init__(
        self, profile: Profile, servers: SharedServers, access: Access, limits: Limits
    ) -> None:
        """Keep what the environment is to play and where; it connects at the first reset."""
        self._profile = profile
        self._servers = servers
        self._access = access
        self._limits = limits
        self._session: Session | None = None
        self._screen: Observation | None = None
        self._rewards: list[float] = []  # of this episode, where the server gave any
        self._done = False  # as the server says
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id."""
        task, arguments = task_of(options, self._profile.tasks, "openenv")
        if self._profile.reset.seed and seed is not None:
            arguments = {**arguments, self._profile.reset.seed: seed % MOST_SEED}
        self._rewards, self._done, self._over, self._screen = [], False, True, None
        try:
            reply = self._begin(arguments)
            if reply.done:
                raise EnvError(f"{task.id}: the episode is over at its reset")
            screen = self._seen(reply)
        except EnvError:
            self._leave()
            raise
        self._screen, self._over = screen, False
        told = at(reply.observation, self._profile.observation.instruction)
        instruction = told if isinstance(told, str) and told else task.instruction
        if not instruction:
            self._leave()
            raise EnvError(
                f"{task.id}: neither the server nor the profile says what is to be done; "
                "observation.instruction or tasks.instruction"
            )
        return screen, {"instruction": instruction}

    def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, dict[str, Any]]:
        """Perform the action. Raises EnvError."""
        if self._session is None or self._screen is None:
            raise EnvError("no episode is being played; call reset first")
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        earned: float | None = 0.0
        size = (self._screen.width, self._screen.height)
        seconds = action.seconds if isinstance(action, Wait) else 0.0
        try:
            for payload in self._profile.templates.payloads_of(action, size):
                reply = self._session.request("step", payload, self._limits.step_s + seconds)
                earned = reply.reward
                if earned is not None:
                    self._rewards.append(earned)
                self._done = reply.done
                self._check_taken(action, reply)
                if not self._done or at(reply.observation, self._profile.observation.screenshot):
                    self._screen = self._seen(reply)
                if self._done:
                    break
        except EnvError:
            self._leave()
            raise
        self._over = self._done or isinstance(action, Done | Fail | Answer)
        return self._screen, earned, self._over, False, {}

    def evaluate(self) -> Verdict:
        """Return what the episode's rewards say."""
        if self._session is None:
            return Verdict("invalid", "no episode is being played, or its server broke")
        return verdict_of(self._rewards, self._profile.reward, done=self._done)

    def close(self) -> None:
        """End the session; may be called twice."""
        self._leave()

    def _begin(self, arguments: Mapping[str, Any]) -> Reply:
        """Return a reset, in the session that there is or in a new one; waits for a server. Raises EnvError."""
        if self._session is not None:
            try:
                return self._session.request("reset", arguments, self._limits.reset_s)
            except ClosedError:
                self._leave()  # a reset changes nothing that is still there, so it may be sent again
        retry = Retry(self._limits.connect_s)
        while True:
            for address in self._servers.in_order():
                try:
                    return self._begin_at(address, arguments)
                except (UnreachableError, CapacityError, ClosedError) as error:
                    last = error
                    self._leave()
                    self._servers.failed(address)
            if not retry.again():
                waited = f"waited {self._limits.connect_s:g} s (env.options.connect_s)"
                cure = (
                    ""
                    if isinstance(last, CapacityError)
                    else "; start it, or correct env.options.url"
                )
                raise EnvError(f"{last}{cure}; {waited}")

    def _begin_at(self, address: Any, arguments: Mapping[str, Any]) -> Reply:
        seen = self._profile.observation
        self._session = Session(
            address,
            self._access,
            connect_s=max(self._limits.connect_s, 5.0),
            reply_mb=self._limits.reply_mb,
            numbers=seen.screenshot.rpartition(".")[2] if seen.encoding == "list" else None,
        )
        self._servers.took(address)
        return self._session.request("reset", arguments, self._limits.reset_s)

    def _seen(self, reply: Reply) -> Observation:
        """Return the screenshot. Raises EnvError with the profile's words where there is none."""
        seen = self._profile.observation
        where = f"observation.{seen.screenshot}"
        value = at(reply.observation, seen.screenshot)
        if reply.pixels is not None:
            return reply.pixels.observation(at(reply.observation, seen.shape), where)
        if value is None:
            why = at(reply.observation, seen.error) or at(reply.observation, seen.failed)
            said = f": {excerpt(str(why))}" if why else ""
            cure = f"; {seen.no_screenshot}" if seen.no_screenshot else ""
            raise EnvError(f"{where}: the server sent no screenshot{said}{cure}")
        if seen.encoding == "list":
            return from_numbers(value, at(reply.observation, seen.shape), where)
        return from_text(value, where)

    def _check_taken(self, action: Action, reply: Reply) -> None:
        """Raise EnvError for an action that failed although the environment takes it always."""
        refused = self._profile.refused
        failed = at(reply.observation, self._profile.observation.failed)
        if refused is not None and failed and action.kind in refused.actions:
            said = f": {excerpt(failed)}" if isinstance(failed, str) else ""
            raise EnvError(f"the server refuses the action {action.kind}{said}; {refused.cure}")

    def _leave(self) -> None:
        session, self._session = self._session, None
        self._screen, self._over = None, True
        if session is not None:
            self._servers.gave_back(session.address)
            session.close()


def verdict_of(rewards: Sequence[float], table: RewardTable, *, done: bool) -> Verdict:
    """Return the verdict of an episode with these rewards, those that the server gave."""
    if not rewards:
        if done:
            return Verdict("invalid", "the episode is over, and the server gave no reward")
        return Verdict("fail", "no reward yet")
    value = {"last": rewards[-1], "sum": sum(rewards), "max": max(rewards)}[table.of]
    share = (value - table.low) / (table.high - table.low)
    said = f"the {table.of} of {len(rewards)} rewards is {value:g}"
    if table.clip:
        share = min(max(share, 0.0), 1.0)
    if not 0 <= share <= 1:
        return Verdict(
            "invalid",
            f"{said}, outside reward.low to reward.high of the profile; reward.clip = true",
        )
    if table.pass_from is None:
        return Verdict.scored(share, said)
    return Verdict("pass" if value >= table.pass_from else "fail", said, share)


PORT = 8000  # of a server, where its address names none
_PROBE_S = 10.0


class OpenenvSuite:
    """Tasks that OpenEnv servers play. Raises TaskError for a profile that cannot be used."""

    name = "openenv"

    def __init__(self, profile: str) -> None:
        self._profile = read_profile(profile, self.name)
        self.tasks: Mapping[str, Task] = {
            task_id: task for task_id, (task, _) in self._profile.tasks.items()
        }
        self._lock = threading.Lock()
        self._servers: dict[tuple[Address, ...], SharedServers] = {}

    @checked
    def make_env(
        self,
        *,
        url: str | list[str] = "",
        token_env: str = "",
        ca_file: str = "",
        connect_s: Pause = 30.0,
        reset_s: Seconds = 120.0,
        step_s: Seconds = 60.0,
        reply_mb: Megabytes = 64.0,
    ) -> OpenenvEnv:
        """Return an environment that opens a session at its first reset.

        `url` is a server's address or a list of them; slots are spread over them. `token_env` names the
        environment variable with a bearer token, `ca_file` the certificates of a private authority.
        `connect_s` is how long to wait for a server that is down or full, `reset_s` and `step_s` the longest
        time of a request, `reply_mb` the most of one answer. Raises TaskError.
        """
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        with self._lock:
            servers = self._servers.setdefault(addresses, SharedServers(addresses))
        limits = Limits(reset_s=reset_s, step_s=step_s, connect_s=connect_s, reply_mb=reply_mb)
        return OpenenvEnv(self._profile, servers, access, limits)

    def check_parts(
        self, *, url: str | list[str] = "", token_env: str = "", ca_file: str = "", **_: object
    ) -> None:
        """Raise MissingPartError where the package websockets is missing, or no server answers."""
        import_websockets()
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        errors = [error for each in addresses if (error := _probe(each, access))]
        if len(errors) == len(addresses):
            raise MissingPartError(f"{errors[0]}; start the environment's server")


def _probe(address: Address, access: Access) -> str:
    """Why a server does not answer; empty where it does, even without the route."""
    where = f"server {address.http}/health"
    connect = partial(HTTPSConnection, context=access.tls) if address.secure else HTTPConnection
    try:
        with closing(connect(address.bare_host, address.port, timeout=_PROBE_S)) as connection:
            connection.request("GET", f"{address.path}/health", headers=access.headers)
            status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{where}: no server answers there ({first_line(error)})"
    return "" if status in (200, 404, 405) else f"{where} answers {status}"
