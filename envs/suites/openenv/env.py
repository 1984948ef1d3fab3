"""Suite `openenv:PROFILE`: tasks of a profile, played in sessions at OpenEnv servers.

OpenenvEnv     plays the tasks of a profile in one session
OpenenvSuite   the tasks of one profile
verdict_of     returns the verdict of an episode from its rewards

A session lasts over several episodes: each reset begins an episode in it. If its server was restarted, the
next reset connects to another server, or to the same one once it answers.
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

MOST_SEED = 1 << 31  # environments pass the seed to generators that take 32 bits


@dataclass(frozen=True)
class Limits:
    """The longest times and the largest answers of one environment's requests."""

    reset_s: float
    step_s: float
    connect_s: float  # how long to wait for a server that is down or full
    reply_mb: float


class OpenenvEnv:
    """An environment that plays the tasks of one profile. See envs.contract.base.GuiEnv for the contract."""

    def __init__(
        self, profile: Profile, servers: SharedServers, access: Access, limits: Limits
    ) -> None:
        """Prepare to play the tasks of `profile` at `servers`. The first reset connects."""
        self._profile = profile
        self._servers = servers
        self._access = access
        self._limits = limits
        self._session: Session | None = None
        self._screen: Observation | None = None
        self._rewards: list[float] = []  # of this episode, if the server gave any
        self._is_done = False  # whether the server reported that the episode is over
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id."""
        task, arguments = task_of(options, self._profile.tasks, "openenv")
        if self._profile.reset.seed and seed is not None:
            arguments = {**arguments, self._profile.reset.seed: seed % MOST_SEED}
        self._rewards, self._is_done, self._over, self._screen = [], False, True, None
        try:
            reply = self._begin(arguments)
            if reply.is_done:
                raise EnvError(f"{task.id}: the episode is over at its reset")
            screen = self._observation(reply)
        except EnvError:
            self._leave()
            raise
        self._screen, self._over = screen, False
        text = at(reply.observation, self._profile.observation.instruction)
        instruction = text if isinstance(text, str) and text else task.instruction
        if not instruction:
            self._leave()
            raise EnvError(
                f"{task.id}: neither the server nor the profile has an instruction; set "
                "observation.instruction or tasks.instruction"
            )
        return screen, {"instruction": instruction}

    def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, dict[str, Any]]:
        """Perform the action. Raises EnvError."""
        if self._session is None or self._screen is None:
            raise EnvError("no episode is being played; call reset first")
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        reward: float | None = 0.0
        size = (self._screen.width, self._screen.height)
        seconds = action.seconds if isinstance(action, Wait) else 0.0
        try:
            for payload in self._profile.templates.payloads_of(action, size):
                reply = self._session.request("step", payload, self._limits.step_s + seconds)
                reward = reply.reward
                if reward is not None:
                    self._rewards.append(reward)
                self._is_done = reply.is_done
                self._refuse_unsupported(action, reply)
                has_screen = at(reply.observation, self._profile.observation.screenshot)
                if not self._is_done or has_screen:
                    self._screen = self._observation(reply)
                if self._is_done:
                    break
        except EnvError:
            self._leave()
            raise
        self._over = self._is_done or isinstance(action, Done | Fail | Answer)
        return self._screen, reward, self._over, False, {}

    def evaluate(self) -> Verdict:
        """Return the verdict by the episode's rewards."""
        if self._session is None:
            return Verdict("invalid", "no episode is being played, or its server broke")
        return verdict_of(self._rewards, self._profile.reward, is_done=self._is_done)

    def close(self) -> None:
        """End the session; may be called twice."""
        self._leave()

    def _begin(self, arguments: Mapping[str, Any]) -> Reply:
        """Reset in the present session or a new one, and return the reply; wait for a server.

        Raises EnvError.
        """
        if self._session is not None:
            try:
                return self._session.request("reset", arguments, self._limits.reset_s)
            except ClosedError:
                self._leave()  # the lost session has no state that matters, so the reset may be sent again
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
                wait = f"waited {self._limits.connect_s:g} s (env.options.connect_s)"
                is_full = isinstance(last, CapacityError)
                fix = "" if is_full else "; start it, or correct env.options.url"
                raise EnvError(f"{last}{fix}; {wait}")

    def _begin_at(self, address: Any, arguments: Mapping[str, Any]) -> Reply:
        """Open a session at an address, reset in it, and return the reply. Raises EnvError."""
        paths = self._profile.observation
        self._session = Session(
            address,
            self._access,
            connect_s=max(self._limits.connect_s, 5.0),
            reply_mb=self._limits.reply_mb,
            numbers=paths.screenshot.rpartition(".")[2] if paths.encoding == "list" else None,
        )
        self._servers.took(address)
        return self._session.request("reset", arguments, self._limits.reset_s)

    def _observation(self, reply: Reply) -> Observation:
        """Return the observation of a reply.

        Raises EnvError, with the profile's advice, if it has no screenshot.
        """
        paths = self._profile.observation
        where = f"observation.{paths.screenshot}"
        value = at(reply.observation, paths.screenshot)
        if reply.pixels is not None:
            return reply.pixels.observation(at(reply.observation, paths.shape), where)
        if value is None:
            why = at(reply.observation, paths.error) or at(reply.observation, paths.failed)
            reason = f": {excerpt(str(why))}" if why else ""
            advice = f"; {paths.no_screenshot}" if paths.no_screenshot else ""
            raise EnvError(f"{where}: the server sent no screenshot{reason}{advice}")
        if paths.encoding == "list":
            return from_numbers(value, at(reply.observation, paths.shape), where)
        return from_text(value, where)

    def _refuse_unsupported(self, action: Action, reply: Reply) -> None:
        """Raise EnvError if the action failed and, by the profile, fails only on a server without support."""
        refused = self._profile.refused
        failed = at(reply.observation, self._profile.observation.failed)
        if refused is not None and failed and action.kind in refused.actions:
            reason = f": {excerpt(failed)}" if isinstance(failed, str) else ""
            raise EnvError(f"the server refuses the action {action.kind}{reason}; {refused.cure}")

    def _leave(self) -> None:
        """End the episode and the session."""
        session, self._session = self._session, None
        self._screen, self._over = None, True
        if session is not None:
            self._servers.gave_back(session.address)
            session.close()


def verdict_of(rewards: Sequence[float], table: RewardTable, *, is_done: bool) -> Verdict:
    """Return the verdict of an episode in which the server gave these rewards."""
    if not rewards:
        if is_done:
            return Verdict("invalid", "the episode is over, and the server gave no reward")
        return Verdict("fail", "no reward yet")
    value = {"last": rewards[-1], "sum": sum(rewards), "max": max(rewards)}[table.of]
    share = (value - table.low) / (table.high - table.low)
    reason = f"the {table.of} of {len(rewards)} rewards is {value:g}"
    if table.clip:
        share = min(max(share, 0.0), 1.0)
    if not 0 <= share <= 1:
        return Verdict(
            "invalid",
            f"{reason}, outside reward.low to reward.high of the profile; reward.clip = true",
        )
    if table.pass_from is None:
        return Verdict.scored(share, reason)
    return Verdict("pass" if value >= table.pass_from else "fail", reason, share)


PORT = 8000  # of a server whose address names none
_PROBE_S = 10.0


class OpenenvSuite:
    """The tasks of a profile, which OpenEnv servers play. Raises TaskError for a wrong profile."""

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
        """Return an environment that opens a session at its first reset. Raises TaskError.

        `url` is the address of a server, or a list of addresses over which slots are spread. `token_env`
        names the environment variable with a bearer token, `ca_file` the certificates of a private authority.
        A slot waits `connect_s` for a server that is down or full. Requests may take `reset_s` and `step_s`,
        and an answer may have `reply_mb`.
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
        """Raise MissingPartError if the package websockets is missing, or no server answers."""
        import_websockets()
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        errors = [error for address in addresses if (error := _probe(address, access))]
        if len(errors) == len(addresses):
            raise MissingPartError(f"{errors[0]}; start the environment's server")


def _probe(address: Address, access: Access) -> str:
    """Return why a server does not answer; "" if it does, even if it has no such route."""
    where = f"server {address.http}/health"
    connect = partial(HTTPSConnection, context=access.tls) if address.secure else HTTPConnection
    try:
        with closing(connect(address.bare_host, address.port, timeout=_PROBE_S)) as connection:
            connection.request("GET", f"{address.path}/health", headers=access.headers)
            status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{where}: no server answers there ({first_line(error)})"
    return "" if status in (200, 404, 405) else f"{where} answers {status}"
