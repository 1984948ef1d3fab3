"""The process of one environment: `python -m dart_cli.env.child`, which IsolatedEnv starts.

    main             reads from its pipe which environment to make, and answers calls until `close` is called
    EnvServer        the environment, and the reply to each call
    plain            writes the arguments of a call as plain values
    pack, read_from  write and read a frame: a JSON header and a blob (a screenshot)
    encoded, decoded write an answer as plain values, and read it again

A frame is two lengths of four bytes, big-endian, then header and blob. Both are bounded, so that a faulty
process cannot make its slot allocate more. All output of the environment goes to stderr, since stdout is the
pipe. While a call is in a queue (envs/contract/queueing.py), frames with QUEUED are sent before its answer.
The process and all processes that it started end with the slot's process, even if that is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from bus.errors import EnvError
from bus.messages import Judgement, Outcome
from dart_cli.env.calls import ANSWERS, Began, Failure, StepResult, perform
from dart_cli.runtime.liveness import when_orphaned
from dart_cli.runtime.streams import keep_going, take_streams
from envs.contract.actions import action_from_dict, action_to_dict
from envs.contract.base import GuiEnv, Task
from envs.contract.methods import call_method
from envs.contract.queueing import PendingCall, SharedWait, answering
from envs.contract.registry import find_task, make_env
from envs.contract.screenshots import StoredEncoding
from envs.tools.process_tree import adopt_orphans, kill_below

LENGTHS = struct.Struct(">II")
MOST_HEADER = 2**24  # bytes
MOST_BLOB = 2**28
QUEUED = "shared_wait"
"""Key in the header of a frame that is not an answer. Its value is what the call is in a queue for (a
SharedWait as a dictionary), or None as soon as the call goes on."""

PipeMessage = tuple[dict[str, Any], bytes]


def main() -> None:
    """Answer calls until the pipe ends or `close` is called."""
    take_streams()
    keep_going()  # output of an environment is not a result: a closed stream must not end the process
    requests, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    adopt_orphans()
    when_orphaned(os.getppid(), _end)
    first = read_from(requests)
    if first is None:
        return
    server = EnvServer(**first[0])

    def send(header: dict[str, Any], blob: bytes = b"") -> None:
        output.write(pack(header, blob))
        output.flush()

    def report_queue(shared_wait: SharedWait | None) -> None:
        send({QUEUED: None if shared_wait is None else asdict(shared_wait)})

    try:
        # A broken pipe means that the slot's process has ended, like the end of the pipe.
        with contextlib.suppress(BrokenPipeError), answering(PendingCall(report_queue)):
            while (request := read_from(requests)) is not None and request[0]["call"] != "close":
                send(*server.answer(**request[0]))
        # The slot has asked to close, or its process has ended; in the latter case _end is the deadline.
        answer = server.answer("close")
    finally:
        kill_below(os.getpid())
    with contextlib.suppress(BrokenPipeError):
        send(*answer)


class EnvServer:
    """One environment, which is made at the first call."""

    def __init__(
        self, suite: str, options: Mapping[str, Any], observe: list[str], screens: StoredEncoding
    ) -> None:
        self._suite = suite
        self._options = options
        self._observe = observe
        self._screens = screens
        self._env: GuiEnv | None = None

    def answer(self, call: str, **payload: Any) -> PipeMessage:
        """Return the reply to a call. An error of the environment is a reply as well."""
        try:
            if call == "close":
                if self._env is not None:
                    call_method(self._env, "close")
                return {"answer": None}, b""
            if self._env is None:
                self._env = make_env(self._suite, observe=self._observe, **self._options)
            if "task" in payload:
                payload["task"] = find_task(self._suite, payload["task"])
            if "action" in payload:
                payload["action"] = action_from_dict(payload["action"])
            return encoded(call, perform(self._env, call, payload, self._screens))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the slot
            return {"failure": asdict(Failure.of(error, call))}, b""


def plain(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as plain values: a task by its id, an action as a dictionary."""
    arguments = dict(payload)
    if isinstance(task := arguments.get("task"), Task):
        arguments["task"] = task.id
    if "action" in arguments:
        arguments["action"] = action_to_dict(arguments["action"])
    return arguments


def encoded(call: str, answer: Any) -> PipeMessage:
    """Return (header, screenshot) of the answer to a call, in plain values."""
    blob = b""
    if isinstance(answer, Began | StepResult):
        blob = answer.observation.screenshot
        answer = replace(answer, observation=replace(answer.observation, screenshot=b""))
    return {"answer": _adapter(call).dump_python(answer, mode="json")}, blob


def decoded(call: str, message: PipeMessage) -> Any:
    """Return the answer that `encoded` wrote."""
    header, blob = message
    answer = _adapter(call).validate_python(header["answer"])
    if isinstance(answer, Began | StepResult):
        return replace(answer, observation=replace(answer.observation, screenshot=blob))
    return answer


@cache
def _adapter(call: str) -> TypeAdapter[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(ANSWERS.get(call, None))
    # envs.contract.base imports these only for type checks, so that checking a configuration loads no
    # messages.
    adapter.rebuild(_types_namespace={"Judgement": Judgement, "Outcome": Outcome})
    return adapter


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(blob)) + text + blob


def read_from(file: BinaryIO) -> PipeMessage | None:
    """Return the next frame; None at the end of the file. Raises EnvError if the frame is too large."""
    head = file.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        return None
    header, blob = lengths(head)
    return json.loads(file.read(header)), file.read(blob)


def lengths(head: bytes) -> tuple[int, int]:
    """Return the two lengths at the head of a frame. Raises EnvError if one is above its bound."""
    header, blob = LENGTHS.unpack(head)
    if header > MOST_HEADER or blob > MOST_BLOB:
        raise EnvError(f"a frame of {header} + {blob} bytes; at most {MOST_HEADER} + {MOST_BLOB}")
    return header, blob


def _end() -> None:
    """Kill all processes that this process started, then this process."""
    kill_below(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
