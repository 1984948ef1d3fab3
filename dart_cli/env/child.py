"""The process of one environment: `python -m dart_cli.env.child`, started by IsolatedEnv.

    main    reads what to make, then answers calls one by one until told to close
    Answers the environment behind the pipe

All output of the environment goes to stderr: stdout is the pipe. The process and all processes that
it started end with the slot's process, even if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from bus.errors import ActionCausedError, DartError, EnvError, NoOracleError
from dart_cli.env import calls
from dart_cli.env.pipe import PipeMessage, pack, read_from
from dart_cli.runtime.liveness import when_orphaned
from dart_cli.runtime.streams import keep_going, take_streams
from envs.actions import action_from_dict, action_to_dict
from envs.base import GuiEnv, Observation, Verdict
from envs.process_tree import adopt_orphans, descendants, kill_below
from envs.registry import find_task, make_env
from envs.screenshots import ScreenFormat

CROWD_POLL_S = 0.2
TOO_MANY = 75
"""Exit code of an environment that had more processes than allowed."""


def main() -> None:
    """Serve until the pipe ends or `close` is called."""
    take_streams()
    keep_going()  # what an environment prints is no result
    requests, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    adopt_orphans()
    when_orphaned(os.getppid(), _end)
    first = read_from(requests)
    if first is None:
        return
    about, _ = first
    if about["memory_mb"]:
        most = about["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    if most := about["max_processes"]:
        threading.Thread(target=_end_beyond, args=(most,), daemon=True).start()
    server = EnvServer(
        about["suite"], about["options"], about["observe"], ScreenFormat(*about["screens"])
    )
    try:
        with contextlib.suppress(BrokenPipeError):  # the slot is gone, as at the end of the pipe
            while (call := read_from(requests)) is not None and call[0]["call"] != "close":
                output.write(pack(*server.answer(call[0])))
                output.flush()
        # The slot has asked to close, or is gone; in the latter case _end is the deadline.
        answer = server.answer({"call": "close"})
    finally:
        kill_below(os.getpid())
    with contextlib.suppress(BrokenPipeError):
        output.write(pack(*answer))
        output.flush()


class EnvServer:
    """One environment, made at the first call."""

    def __init__(
        self,
        suite: str,
        options: Mapping[str, Any],
        observe: Sequence[str],
        screens: ScreenFormat = calls.AS_GIVEN,
    ) -> None:
        self._suite = suite
        self._options = options
        self._observe = observe
        self._screens = screens
        self._env: GuiEnv | None = None

    def answer(self, call: dict[str, Any]) -> PipeMessage:
        """The reply to a call; an error is a reply, too."""
        try:
            return self._answer(call)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the slot
            return _error_reply(error, call["call"]), b""

    def _answer(self, call: dict[str, Any]) -> PipeMessage:
        what = call["call"]
        if what == "close":
            if self._env is not None:
                self._env.close()
            return {}, b""
        if self._env is None:
            self._env = make_env(self._suite, observe=self._observe, **self._options)
        env = self._env
        if what == "reset":
            task = find_task(self._suite, call["task"])
            screen, instruction = calls.reset(
                env, task, call["seed"], self._screens, free=call.get("free", False)
            )
            return {"instruction": instruction, **_image_header(screen)}, screen.screenshot
        if what == "step":
            stepped = calls.step(env, action_from_dict(call["action"]), self._screens)
            ends = {
                "terminated": stepped.terminated,
                "truncated": stepped.truncated,
                "reward": stepped.reward,
            }
            return ends | _image_header(stepped.observation), stepped.observation.screenshot
        if what == "solve":
            action, hint = calls.solve(env)
            return {"action": action_to_dict(action), "hint": hint}, b""
        if what == "look":
            looked = calls.look(env)
            if looked is None:
                return {"state": None}, b""
            state, elements = looked
            return {"state": asdict(state), "elements": [asdict(each) for each in elements]}, b""
        verdict = calls.judge_start(env) if what == "judge_start" else calls.evaluate(env)
        return {"verdict": _verdict_fields(verdict)}, b""


def _image_header(screen: Observation) -> dict[str, Any]:
    size = {"width": screen.width, "height": screen.height}
    kept = {"texts": dict(screen.texts), "screen_key": screen.screen_key}
    return {"media_type": screen.media_type, **size, **kept}


def _verdict_fields(verdict: Verdict | None) -> list[Any] | None:
    return None if verdict is None else list(astuple(verdict))


def _error_reply(error: BaseException, what: str) -> dict[str, Any]:
    if isinstance(error, EnvError):
        kinds = (kind for kind in (NoOracleError, ActionCausedError) if isinstance(error, kind))
        return {"error": str(error), "kind": next(kinds, EnvError).__name__}
    reply = {"error": f"{what}: {type(error).__name__}: {error}", "kind": EnvError.__name__}
    # The slot's process logs it: this one is not the last to fail at that place.
    told = {} if isinstance(error, DartError) else {"traceback": list(calls.traceback_of(error))}
    return reply | told


def _end() -> None:
    """End this process and all that it started."""
    kill_below(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def _end_beyond(most: int) -> None:
    """End this process, and all that it started, once they are more than `most`."""
    while 1 + len(descendants(os.getpid())) <= most:
        time.sleep(CROWD_POLL_S)
    kill_below(os.getpid())
    os._exit(TOO_MANY)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
