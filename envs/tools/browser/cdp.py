"""The Chrome DevTools Protocol over a pipe: the part that an environment needs.

    Chromium       one browser process: calls to it and its pages, and its end
    PageSession    calls to one page
    Call           one command, which may be sent together with others
    SentCalls      commands on their way: a page that draws on command answers some of them only after a frame
    Listener       a function that gets the events of a page or of the browser

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self

from bus.errors import EnvError
from envs.contract.queueing import SharedLock
from envs.tools.browser.process import BrowserProcess

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


Listener = Callable[[str, dict[str, Any]], None]
"""A function that gets each event's method and parameters, in the thread that reads; it must not wait."""


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
        self._listeners: dict[str, Listener] = {}  # by session; "" is the browser's
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
    def folder(self) -> Path:
        """A folder that lasts as long as the browser."""
        return self._process.folder

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
        return self.attach(target["targetId"])

    def attach(self, target: str) -> PageSession:
        """Return a session of a page that exists. Raises EnvError."""
        reply = self.call("Target.attachToTarget", targetId=target, flatten=True)
        return self.adopt(target, reply["sessionId"])

    def adopt(self, target: str, session: str) -> PageSession:
        """Return the session with which the browser attached itself to a page."""
        with self._lock:
            self._sessions[target] = session
        return PageSession(self, session, self._deadline_s)

    def listen(self, session: str, listener: Listener | None) -> None:
        """Pass the events of a session (empty: the browser's) to `listener`; None ends that."""
        with self._lock:
            if listener is None:
                self._listeners.pop(session, None)
            else:
                self._listeners[session] = listener

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
        with self.send(session, calls, deadline_s) as sent:
            return sent.replies(deadline_s)

    def send(self, session: str, calls: Sequence[Call], deadline_s: float) -> SentCalls:
        """Send all `calls` at once; the caller waits for the replies. Raises EnvError as `exchange` does."""
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
        sent = SentCalls(calls_by_number, answers, self._forget)
        try:
            self._process.write(message, deadline_s)
        except BaseException:
            sent.close()
            raise
        return sent

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
            return
        if message["method"] in ("Target.targetCrashed", "Target.targetDestroyed"):
            self._end_session(message["params"]["targetId"], message["method"])
        if not self._listeners:
            return
        with self._lock:
            listener = self._listeners.get(message.get("sessionId", ""))
        if listener is not None:
            try:
                listener(message["method"], message.get("params", {}))
            except Exception:  # without this thread no answer would be delivered any more
                logger.exception("an event of Chromium was not noted: %s", message["method"])

    def _forget(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                self._awaited_calls.pop(number, None)

    def _end_session(self, target: str, event: str) -> None:
        why = "the page crashed" if event == "Target.targetCrashed" else "the page was closed"
        with self._lock:
            session = self._sessions.pop(target, None)
            if session is not None:
                self._listeners.pop(session, None)
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


class SentCalls:
    """Commands on their way to a page, used by one thread; as a context it forgets them at its end."""

    def __init__(
        self,
        calls: dict[int, Call],
        answers: queue.SimpleQueue[_CdpAnswer],
        forget: Callable[[Iterable[int]], None],
    ) -> None:
        self._calls = calls  # by number, in their order
        self._answers = answers
        self._forget = forget
        self._replies: dict[int, CdpResult] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answered(self, timeout_s: float = 0.0) -> bool:
        """Return True once all replies have come, waiting for `timeout_s` at most.

        Raises EnvError for the first command that was refused, or whose page or browser ended.
        """
        until = time.monotonic() + timeout_s
        while len(self._replies) < len(self._calls):
            try:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return False
            if answer.error:
                kind = DocumentLeftError if answer.error in LEFT else EnvError
                raise kind(f"{self._calls[answer.number].method}: {answer.error}")
            self._replies[answer.number] = answer.reply
        return True

    def replies(self, timeout_s: float = 0.0) -> list[CdpResult]:
        """Return the replies in the order of the commands.

        Raises EnvError as `answered` does, and if one is missing after `timeout_s`.
        """
        if not self.answered(timeout_s):
            late = next(
                self._calls[each].method for each in self._calls if each not in self._replies
            )
            raise EnvError(f"Chromium gave no answer to {late} in {timeout_s:g} s")
        return [self._replies[number] for number in self._calls]

    def close(self) -> None:
        """Forget the commands; may be called twice."""
        self._forget(self._calls)


class PageSession:
    """The session of one page, used by one thread at a time."""

    def __init__(self, browser: Chromium, session_id: str, deadline_s: float) -> None:
        self.browser = browser
        self._id = session_id
        self._deadline_s = deadline_s

    @property
    def id(self) -> str:
        """The id of the session."""
        return self._id

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

    def begin(self, calls: Sequence[Call]) -> SentCalls:
        """Send several commands at once; the caller waits for their replies. Raises EnvError."""
        return self.browser.send(self._id, calls, self._deadline_s)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; if it is a promise, the value to which it resolves.

        Raises EnvError if it throws, DocumentLeftError if the page goes elsewhere meanwhile.
        """
        return value_of(self.send([evaluation(expression)])[0])


def evaluation(expression: str) -> Call:
    """Return the command that evaluates a JavaScript expression and waits if it is a promise."""
    params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
    return Call("Runtime.evaluate", params)


def value_of(reply: CdpResult) -> Any:
    """Return the value in the reply to an `evaluation`. Raises EnvError if the expression threw."""
    if details := reply.get("exceptionDetails"):
        what = details.get("exception", {}).get("description", details.get("text", ""))
        raise EnvError(f"the page threw {what.splitlines()[0] if what else 'something'}")
    return reply["result"].get("value")


def _encode(number: int, call: Call, session: str) -> bytes:
    message: dict[str, Any] = {"id": number, "method": call.method, "params": call.params}
    if session:
        message["sessionId"] = session
    return json.dumps(message).encode() + b"\0"
