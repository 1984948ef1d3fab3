"""The Chrome DevTools Protocol over a pipe: the part that an environment needs.

    Chromium      one browser process: calls to it and its pages, and its end
    PageSession   calls to one page
    Call          one command, which may be sent together with others

It uses a pipe instead of a WebSocket: there is no port that other users of the host could reach, no polling
at the start, no package to install, and a browser whose pipe is closed exits, so that none outlives this
process, even after `kill -9`. Messages are JSON, each ended by a zero byte (Chromium,
content/browser/devtools/devtools_pipe_handler.cc). Any thread may call; one thread reads.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from bus.errors import EnvError
from envs.contract.queueing import SharedLock
from envs.tools.chromium import BrowserProcess

logger = logging.getLogger(__name__)

CdpResult = dict[str, Any]

READ_BYTES = 1 << 18

LEFT = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find context with specified id",
    "Promise was collected",
)
"""Chromium's errors for a command whose document was replaced by another."""


class DocumentLeftError(EnvError):
    """The page went to another document before the command was finished; the page itself lives."""


class Call(NamedTuple):
    """One command and its parameters."""

    method: str
    params: dict[str, Any]


class _CdpAnswer(NamedTuple):
    number: int
    reply: CdpResult
    error: str


class _AwaitedCall(NamedTuple):
    answers: queue.SimpleQueue[_CdpAnswer]
    session: str


class Chromium:
    """One browser, usable from any number of threads; `flags` are added to its command line.

    Raises EnvError if it cannot be started.
    """

    def __init__(
        self, binary: Path, scale: float, deadline_s: float, flags: Sequence[str] = ()
    ) -> None:
        self._end_reason = ""
        self._deadline_s = deadline_s
        self._ids = itertools.count(1)
        self._drawing = SharedLock("a frame of a shared browser")
        # This lock guards the awaited calls, the sessions and the reason of the end.
        self._lock = threading.Lock()
        self._awaited_calls: dict[int, _AwaitedCall] = {}
        self._sessions: dict[str, str] = {}  # by target
        self._process = BrowserProcess(binary, scale, flags)
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()
        try:
            self.version: str = self.call("Browser.getVersion")["product"]
            if not self.version.startswith("HeadlessChrome/"):
                raise EnvError(f"{self.version} cannot draw on command; a headless shell can")
            self.call("Target.setDiscoverTargets", discover=True)  # reports crashed pages
        except EnvError as error:
            log_line = self._process.last_words()
            self.close()
            raise EnvError(
                f"{binary} did not start: {error}{log_line and f': {log_line}'}"
            ) from error

    @property
    def pid(self) -> int:
        """The process id of the browser, which is also the id of the group of its processes."""
        return self._process.pid

    @property
    def end_reason(self) -> str:
        """How the browser ended; empty while it lives."""
        if not self._end_reason and not self._process.running:
            self._end(self._process.end())
        return self._end_reason

    def call(self, method: str, **params: Any) -> CdpResult:
        """Send one command to the browser itself and return the reply. Raises EnvError."""
        return self.exchange("", [Call(method, params)], self._deadline_s)[0]

    def open(self, context: str, width: int, height: int) -> PageSession:
        """Return a new page in a browser context, of a size in CSS pixels, that draws only on command.

        Raises EnvError.
        """
        target = self.call(
            "Target.createTarget",
            url="about:blank",
            browserContextId=context,
            width=width,
            height=height,
            enableBeginFrameControl=True,
        )
        target_id = target["targetId"]
        reply = self.call("Target.attachToTarget", targetId=target_id, flatten=True)
        with self._lock:
            self._sessions[target_id] = reply["sessionId"]
        return PageSession(self, reply["sessionId"], self._deadline_s)

    def has(self, session: str) -> bool:
        """Return True if the page of `session` lives."""
        with self._lock:
            return session in self._sessions.values()

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context that holds the lock for drawing a frame: beginning two at once ends the browser.

        Entering it raises EnvError if the previous frame is not finished in time.
        """
        patience_s = 2 * self._deadline_s
        return self._drawing.hold(patience_s, f"Chromium has drawn one frame for {patience_s:g} s")

    def exchange(self, session: str, calls: Sequence[Call], deadline_s: float) -> list[CdpResult]:
        """Send all `calls` at once and wait for all replies, in their order.

        `session` is the id of a page's session, or empty for the browser. Raises EnvError if a call is
        refused, if there is no reply within `deadline_s`, and if the page or the browser ends.
        """
        answers: queue.SimpleQueue[_CdpAnswer] = queue.SimpleQueue()
        calls_by_number = {next(self._ids): call for call in calls}
        message = b"".join(
            _encode(number, call, session) for number, call in calls_by_number.items()
        )
        with self._lock:
            if self._end_reason:
                raise EnvError(f"Chromium is gone: {self._end_reason}")
            self._awaited_calls.update(
                (number, _AwaitedCall(answers, session)) for number in calls_by_number
            )
        try:
            self._process.write(message, deadline_s)
            return _collect(answers, calls_by_number, deadline_s)
        finally:
            with self._lock:
                for number in calls_by_number:
                    self._awaited_calls.pop(number, None)

    def close(self) -> None:
        """End the browser with all its processes and remove its profile; may be called twice."""
        self._end("it was closed")
        self._process.close()
        self._reader.join(self._deadline_s)

    def _read(self) -> None:
        """Deliver each message to the caller that waits for it, until the browser closes the pipe."""
        rest = b""
        while block := self._process.read(READ_BYTES):
            *messages, rest = (rest + block).split(b"\0")
            for message in messages:
                self._receive(json.loads(message))
        self._end(self._process.end())

    def _receive(self, message: CdpResult) -> None:
        if "id" in message:
            with self._lock:
                awaited_call = self._awaited_calls.get(message["id"])
            if awaited_call is not None:
                refusal = message.get("error", {}).get("message", "")
                answer = _CdpAnswer(message["id"], message.get("result", {}), refusal)
                awaited_call.answers.put(answer)
        elif message["method"] in ("Target.targetCrashed", "Target.targetDestroyed"):
            self._end_session(message["params"]["targetId"], message["method"])

    def _end_session(self, target: str, event: str) -> None:
        why = "the page crashed" if event == "Target.targetCrashed" else "the page was closed"
        with self._lock:
            session = self._sessions.pop(target, None)
            if session is not None:
                self._fail(why, session)

    def _end(self, why: str) -> None:
        with self._lock:
            self._end_reason = self._end_reason or why
            self._fail(f"Chromium ended: {why}")

    def _fail(self, why: str, session: str | None = None) -> None:
        """Answer all awaited calls, or only one session's, with an error. The caller must hold the lock."""
        for number, awaited_call in self._awaited_calls.items():
            if session in (None, awaited_call.session):
                awaited_call.answers.put(_CdpAnswer(number, {}, why))


class PageSession:
    """The session of one page, used by one thread at a time."""

    def __init__(self, browser: Chromium, session_id: str, deadline_s: float) -> None:
        self.browser = browser
        self._id = session_id
        self._deadline_s = deadline_s

    @property
    def lives(self) -> bool:
        """Whether page and browser live; a crash may not be reported yet."""
        return not self.browser.end_reason and self.browser.has(self._id)

    def call(self, method: str, **params: Any) -> CdpResult:
        """Send one command and return its reply. Raises EnvError."""
        return self.send([Call(method, params)])[0]

    def send(self, calls: Sequence[Call]) -> list[CdpResult]:
        """Send several commands at once and return their replies in order. Raises EnvError."""
        return self.browser.exchange(self._id, calls, self._deadline_s)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; if it is a promise, the value to which it resolves.

        Raises EnvError if it throws, DocumentLeftError if the page goes elsewhere meanwhile.
        """
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if details := reply.get("exceptionDetails"):
            what = details.get("exception", {}).get("description", details.get("text", ""))
            raise EnvError(f"the page threw {what.splitlines()[0] if what else 'something'}")
        return reply["result"].get("value")


def _encode(number: int, call: Call, session: str) -> bytes:
    message: dict[str, Any] = {"id": number, "method": call.method, "params": call.params}
    if session:
        message["sessionId"] = session
    return json.dumps(message).encode() + b"\0"


def _collect(
    answers: queue.SimpleQueue[_CdpAnswer], calls: dict[int, Call], deadline_s: float
) -> list[CdpResult]:
    """Return the replies to `calls` in their order. Raises EnvError for the first call that fails."""
    replies: dict[int, CdpResult] = {}
    until = time.monotonic() + deadline_s
    while len(replies) < len(calls):
        try:
            answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            late = next(call.method for number, call in calls.items() if number not in replies)
            raise EnvError(f"Chromium gave no answer to {late} in {deadline_s:g} s") from None
        if answer.error:
            kind = DocumentLeftError if answer.error in LEFT else EnvError
            raise kind(f"{calls[answer.number].method}: {answer.error}")
        replies[answer.number] = answer.reply
    return [replies[number] for number in calls]
