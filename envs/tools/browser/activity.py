"""What a page does: its requests and documents that are under way, and what it reports beside its screen.

PageEvent     something that a page did beside its screen: a line of its console, a failed request, a dialog
PageActivity  notes the events of one page, and says whether something is under way that is waited for
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from envs.tools.browser.cdp import CdpResult

ANSWERED_S = 0.05
"""Seconds after the last bytes of an answer for which its request is waited for: the end of an answer that the
page does not read is reported only once the page's time passes."""
SOCKET_S = (
    0.25  # seconds for which the first message of a WebSocket is waited for after the page sent one
)
MOST_EVENTS = 200  # of a page that are kept until they are taken
LONGEST_EVENT = 500  # characters

EventKind = Literal["console", "exception", "request", "dialog", "tab", "download", "file"]


@dataclass(frozen=True)
class PageEvent:
    """Something that a page did beside its screen."""

    kind: EventKind
    text: str
    address: str = ""  # of the request or the script; empty if unknown

    @property
    def line(self) -> str:
        """The event in one line, for info["app_log"]."""
        return f"{self.kind}: {self.text}" + (f" ({self.address})" if self.address else "")


@dataclass
class _Request:
    """A request that is under way."""

    address: str
    waited_for_s: float  # until when nothing goes on without it
    began_s: float = 0.0
    streams: bool = False  # whether it is known to stay open
    answered: bool = False


class PageActivity:
    """The events of one page. `hear` is called by the thread that reads, the rest by the one that acts."""

    def __init__(self, files_for_pickers: str, patience_s: float) -> None:
        """Begin with nothing under way; `files_for_pickers` names what file pickers get, for their events.

        A request that takes longer than `patience_s` is one that stays open (a long poll, a stream), and is
        not waited for.
        """
        self.expired = threading.Event()  # set when the time that was granted has passed
        self.questions: deque[tuple[str, CdpResult]] = deque()
        """Events that must be answered: dialogs and file pickers."""
        self.sent = 0  # requests so far
        self.documents = 0  # how many the page has shown
        self.moves = 0  # how often its address has changed or was loaded anew
        self.document_status = 0  # of the answer with the page's document
        self._files = files_for_pickers
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}  # by id
        self._loading: dict[str, float] = {}  # id of a frame that loads -> since when
        self._sockets: dict[
            str, float
        ] = {}  # id of a WebSocket -> until when a message is waited for
        self._events: deque[PageEvent] = deque(maxlen=MOST_EVENTS)
        self._drag: CdpResult | None = None

    def hear(self, method: str, params: CdpResult) -> None:
        """Note an event of the page."""
        match method:
            case "Emulation.virtualTimeBudgetExpired":
                self.expired.set()
            case "Page.frameRequestedNavigation" | "Page.frameStartedLoading":
                self.loading_begins(params["frameId"])
            case "Page.frameStoppedLoading" | "Page.frameDetached" | "Page.downloadWillBegin":
                self.loading_ends(params["frameId"])
            case "Page.frameNavigated":
                self.documents += "parentId" not in params["frame"]
                self.moves += "parentId" not in params["frame"]
            case "Page.navigatedWithinDocument":
                self.moves += 1
            case "Page.javascriptDialogOpening":
                self.note("dialog", f"{params['type']}: {params['message']}", params["url"])
                self.questions.append((method, params))
            case "Page.fileChooserOpened":
                self.note("file", f"file picker: {self._files or 'cancelled'}")
                self.questions.append((method, params))
            case "Input.dragIntercepted":
                self._drag = params["data"]
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                text = details.get("exception", {}).get("description") or details.get("text", "")
                self.note("exception", text, details.get("url", ""))
            case "Runtime.consoleAPICalled":
                if params["type"] in ("error", "warning", "assert"):
                    text = " ".join(map(_argument, params["args"]))
                    self.note("console", f"{params['type']}: {text}")
            case "Log.entryAdded":
                entry = params["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.note("console", f"error: {entry['text']}", entry.get("url", ""))
            case _ if method.startswith("Network."):
                self._hear_network(method.removeprefix("Network."), params)

    def is_busy(self) -> bool:
        """Return True if a request or a document is under way that does not stay open for long."""
        now = time.monotonic()
        with self._lock:
            until = [request.waited_for_s for request in self._requests.values()]
            until += [began + self._patience_s for began in self._loading.values()]
            until += self._sockets.values()
        return any(at > now for at in until)

    def has_open(self) -> bool:
        """Return True if a request stays open, so that the page's time must not stand still for it."""
        oldest = time.monotonic() - self._patience_s
        with self._lock:
            requests = list(self._requests.values())
        return any(each.streams or each.began_s < oldest for each in requests) or self.has_unread()

    def has_unread(self) -> bool:
        """Return True if a request is answered and only the page, which may not read it, keeps it open."""
        now = time.monotonic()
        with self._lock:
            return any(
                each.answered and each.waited_for_s < now for each in self._requests.values()
            )

    def take_events(self) -> list[PageEvent]:
        """Return the events since the last call; of many only the last ones."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def take_drag(self) -> CdpResult | None:
        """Return what the pointer has begun to drag from one element to another, once."""
        with self._lock:
            drag, self._drag = self._drag, None
        return drag

    def note(self, kind: EventKind, text: str, address: str = "") -> None:
        """Keep an event."""
        event = PageEvent(kind, " ".join(text.split())[:LONGEST_EVENT], address[:LONGEST_EVENT])
        with self._lock:
            self._events.append(event)

    def loading_begins(self, frame: str) -> None:
        """Note that a frame loads a document."""
        with self._lock:
            self._loading.setdefault(frame, time.monotonic())

    def loading_ends(self, frame: str) -> None:
        """Note that a frame has its document."""
        with self._lock:
            self._loading.pop(frame, None)

    def _hear_network(self, name: str, params: CdpResult) -> None:
        """Note an event of requests and WebSockets."""
        now, number = time.monotonic(), params.get("requestId", "")
        match name:
            case "requestWillBeSent":
                streams = params.get("type") == "EventSource"
                waited_for_s = 0.0 if streams else now + self._patience_s
                request = _Request(params["request"]["url"], waited_for_s, now, streams)
                self.sent += 1
                with self._lock:
                    self._requests[number] = request
            case "responseReceived":
                response = params["response"]
                self._answer_goes_on(number)
                if params.get("type") == "Document":
                    self.document_status = response["status"]
                if response["status"] >= 400:
                    self.note("request", f"status {response['status']}", response["url"])
            case "dataReceived":
                self._answer_goes_on(number)
            case "loadingFinished" | "loadingFailed":
                with self._lock:
                    last = self._requests.pop(number, None)
                if name == "loadingFailed" and not params.get("canceled"):
                    address = last.address if last is not None else ""
                    self.note("request", params.get("errorText", "failed"), address)
            case "webSocketFrameSent":
                with self._lock:
                    self._sockets[number] = now + SOCKET_S
            case "webSocketFrameReceived" | "webSocketClosed":
                with self._lock:
                    self._sockets.pop(number, None)

    def _answer_goes_on(self, number: str) -> None:
        """Note that bytes of an answer have come."""
        with self._lock:
            request = self._requests.get(number)
            if request is not None and not request.streams:
                until = time.monotonic() + ANSWERED_S
                request.waited_for_s = min(until, request.began_s + self._patience_s)
                request.answered = True


def _argument(value: CdpResult) -> str:
    """Return an argument of the console as text."""
    if "value" in value:
        inner = value["value"]
        return inner if isinstance(inner, str) else json.dumps(inner)
    return str(value.get("description", value.get("type", "")))
