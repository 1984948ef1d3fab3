"""One page of a browser, whose time passes and which draws only on command.

Tab         opens addresses, acts, waits until the page is still, takes screenshots, runs scripts
PageEvent   something that a page did beside its screen: a line of its console, a failed request, a dialog
TabRules    what every page of an episode gets: size, clock, answers to dialogs

The page's clock is Chromium's virtual time (Emulation.setVirtualTimePolicy). It stands still while the policy
thinks and while requests are under way, and otherwise runs as fast as the page computes. A page that asks its
server for something is therefore at the same point of its time however slow server and host are.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.contract.options import ImageEncoding
from envs.contract.queueing import leave_if_given_up
from envs.contract.screenshots import SCREEN_JPEG_QUALITY
from envs.tools.browser.cdp import (
    Call,
    CdpResult,
    Chromium,
    DocumentLeftError,
    PageSession,
    evaluation,
    value_of,
)
from envs.tools.browser.inputs import PageInput

FRAME_MS = 25.0  # of the page's time between two frames
CALM_FRAMES = 2  # frames in a row without a change, of a page that is still
DRAG_MOVES = 4  # moves of a drag between two frames
WHEEL_FRAMES = 3  # after a turn of the wheel: the browser scrolls in the second one
POLL_S = 0.002
LONG_REQUEST_S = 3.0
"""Seconds after which a request is one that stays open (a long poll, a stream), for which nothing waits."""
ANSWERED_S = 0.1
"""Seconds after the last bytes of an answer for which its request is waited for: the end of an answer that the
page does not read is reported only once the page's time passes."""
STUCK_S = 0.5  # without an answer that needs no frame, after which frames are drawn for it
MOST_EVENTS = 200  # of a page that are kept until they are taken
LONGEST_EVENT = 500  # characters
STARVATION = 10_000  # tasks that a page may run without its clock moving on

EventKind = Literal["console", "exception", "request", "dialog", "tab", "download", "file"]


@dataclass(frozen=True)
class PageEvent:
    """Something that a page did beside its screen."""

    kind: EventKind
    text: str
    address: str = ""  # of the request or the script; empty if unknown


@dataclass(frozen=True)
class TabRules:
    """What every page of an episode gets."""

    size: tuple[int, int]  # CSS pixels
    scale: float = 1.0  # pixels of the screenshot per CSS pixel
    encoding: ImageEncoding = "png"
    deadline_s: float = 20.0  # the longest answer of the page
    began_s: float = (
        0.0  # what the page's clock shows at first, seconds since 1970; 0: the present time
    )
    seed: int = 0  # of the page's own random numbers
    accepts_dialogs: bool = True  # whether confirm and prompt are answered with OK
    uploads: tuple[str, ...] = ()  # the files that a file picker gets; none: it is cancelled


@dataclass
class _Request:
    """A request that is under way."""

    began_s: float
    waited_for_s: float  # until when nothing goes on without it


@dataclass
class _Activity:
    """What a page has under way, written by the thread that reads the browser's events."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: dict[str, _Request] = field(default_factory=dict)  # by id
    frames: dict[str, float] = field(default_factory=dict)  # id of a frame that loads -> since when
    expired: threading.Event = field(default_factory=threading.Event)  # the granted time has passed
    asked: deque[tuple[str, CdpResult]] = field(default_factory=deque)  # what must be answered
    events: deque[PageEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    drag: CdpResult | None = None  # of a drag that has begun
    addresses: dict[str, str] = field(default_factory=dict)  # of the requests that are under way


class Tab:
    """A page in a browser context. One thread uses it; its methods raise EnvError if the page is broken."""

    def __init__(
        self,
        session: PageSession,
        rules: TabRules,
        attend: Callable[[], None],
    ) -> None:
        """Prepare the page of `session`, which waits for a debugger, and let it begin.

        `attend` is called whenever the page is waited for; it takes care of new windows.
        """
        self.session = session
        self.rules = rules
        self._browser: Chromium = session.browser
        self._attend_windows = attend
        self._activity = _Activity()
        self._input = PageInput(rules.scale)
        self._base_ms, self._passed_ms, self._last_frame_ms = 0.0, 0.0, 0.0
        self._drag: CdpResult | None = None  # what the pointer drags from one element to another
        self._calm = 0  # frames in a row without a change
        self._shot: dict[str, Any] = {"format": rules.encoding, "optimizeForSpeed": True}
        if rules.encoding == "jpeg":
            self._shot["quality"] = SCREEN_JPEG_QUALITY
        self._browser.listen(session.id, self._hear)
        self._prepare()

    # --- what the environment asks for ---

    def open(self, address: str) -> None:
        """Go to an address. Raises EnvError if it cannot be loaded."""
        self._loading_begins("main")
        try:
            reply = self._answers(Call("Page.navigate", {"url": address}))[0]
        finally:
            self._loading_ends("main")
        if error := reply.get("errorText"):
            raise EnvError(f"{address} cannot be loaded: {error}")

    def settle(self, least_ms: float, most_ms: float, patience_s: float) -> bool:
        """Let `least_ms` of the page's time pass, and more until it is still, at most `most_ms`.

        A page is still if no request and no document is under way and `CALM_FRAMES` frames brought no change.
        `patience_s` is the longest wait for its requests. Returns False if the page is not still.
        """
        until, passed = time.monotonic() + patience_s, 0.0
        while True:
            self._pass(FRAME_MS)
            passed += FRAME_MS
            idle = self._await_requests(until)
            if passed >= least_ms and idle and self._calm >= CALM_FRAMES:
                return True
            if passed >= most_ms or time.monotonic() > until:
                return False

    def act(self, action: Action) -> None:
        """Perform an action of mouse or keyboard."""
        calls = self._input.commands_of(action)
        if not calls:
            return
        if self._drag or any(call.params.get("buttons") and _is_move(call) for call in calls):
            # Pages that move what is dragged do so in their frames, and drop it where it was in the last one.
            for index, group in enumerate(_by_moves(calls)):
                if index % DRAG_MOVES == 1 or group[0].params.get("type") == "mouseReleased":
                    self._pass(FRAME_MS)
                self._move_or_drag(group)
        else:
            self._perform(calls)
        # After an input the page does nothing but that until a frame is drawn: answers to its requests wait.
        self._frame()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; if it is a promise, what it resolves to.

        The page's time passes only while a promise is waited for. Raises EnvError if it throws.
        """
        until = time.monotonic() + self.rules.deadline_s
        while True:
            try:
                return value_of(self._finish([evaluation(expression)])[0])
            except DocumentLeftError:
                if time.monotonic() > until:
                    raise

    def look(self) -> bytes:
        """Return a screenshot, encoded by the rules."""
        until = time.monotonic() + self.rules.deadline_s
        while time.monotonic() < until:
            self._grant(FRAME_MS)
            if data := self._frame(self._shot).get("screenshotData"):
                return base64.b64decode(data)
            time.sleep(POLL_S)
        raise EnvError(f"the page drew no frame in {self.rules.deadline_s:g} s")

    def take_events(self) -> list[PageEvent]:
        """Return what the page did beside its screen since the last call; of many only the last ones."""
        with self._activity.lock:
            events = list(self._activity.events)
            self._activity.events.clear()
        return events

    @property
    def lives(self) -> bool:
        """Whether the page is open; one may close itself."""
        return self.session.lives

    def close(self) -> None:
        """Pass no more of its events on."""
        self._browser.listen(self.session.id, None)

    # --- time and frames ---

    def _pass(self, ms: float) -> None:
        """Let the page's time pass, then draw a frame."""
        self._grant(ms)
        damage = self._frame().get("hasDamage", False)
        self._calm = 0 if damage else self._calm + 1

    def _grant(self, ms: float) -> None:
        """Let the page's time pass; it stands still while requests are under way."""
        began = time.monotonic()
        policy, granted_at = "pauseIfNetworkFetchesPending", 0.0
        while True:
            now = time.monotonic()
            if now - granted_at > STUCK_S and (granted_at == 0.0 or not self._is_busy()):
                self._activity.expired.clear()
                self._set_time(policy, ms)
                granted_at, policy = now, "advance"
            if self._activity.expired.wait(POLL_S * 5):
                break
            leave_if_given_up()
            self._attend()
            if now - began > self.rules.deadline_s:
                raise EnvError(f"the page's time did not pass in {self.rules.deadline_s:g} s")
        self._passed_ms += ms

    def _set_time(self, policy: str, ms: float, **more: object) -> None:
        params: dict[str, Any] = {"policy": policy, **more}
        if policy != "pause":
            params |= {"budget": ms, "maxVirtualTimeTaskStarvationCount": STARVATION}
        reply = self._answers(Call("Emulation.setVirtualTimePolicy", params))[0]
        base = float(reply["virtualTimeTicksBase"])
        if abs(base - self._base_ms) > 1.0:  # another process has the page
            self._base_ms, self._passed_ms = base, 0.0

    def _frame(self, shot: dict[str, Any] | None = None) -> CdpResult:
        """Draw a frame; two frames never have the same time, which the browser would wait for in vain."""
        at = max(self._base_ms + self._passed_ms, self._last_frame_ms + 1.0)
        self._last_frame_ms = at
        params: dict[str, Any] = {"frameTimeTicks": at, "interval": FRAME_MS}
        if shot is not None:
            params["screenshot"] = shot
        with self._browser.drawing():
            return self._answers(Call("HeadlessExperimental.beginFrame", params))[0]

    def _is_busy(self) -> bool:
        """Return True if a request or a document is under way that does not stay open for long."""
        now = time.monotonic()
        with self._activity.lock:
            until = [request.waited_for_s for request in self._activity.requests.values()]
            until += [began + LONG_REQUEST_S for began in self._activity.frames.values()]
        return any(at > now for at in until)

    def _await_requests(self, until: float) -> bool:
        """Wait until nothing is under way; return False if something still is at `until`."""
        while self._is_busy():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
            leave_if_given_up()
            self._attend()
        return True

    # --- commands ---

    def _answers(self, *calls: Call) -> list[CdpResult]:
        """Send commands and return their replies, while dialogs and windows are attended to."""
        until = time.monotonic() + self.rules.deadline_s
        with self.session.begin(calls) as sent:
            while not sent.answered(POLL_S):
                leave_if_given_up()
                self._attend()
                if time.monotonic() > until:
                    raise EnvError(
                        f"the page did not answer {calls[0].method} in {self.rules.deadline_s:g} s"
                    )
            return sent.replies()

    def _perform(self, calls: Sequence[Call]) -> None:
        """Send commands of mouse and keyboard; a document that they lead away from does not answer."""
        frames = (
            WHEEL_FRAMES if any(call.params.get("type") == "mouseWheel" for call in calls) else 0
        )
        with suppress(DocumentLeftError):
            self._finish(calls, frames)

    def _finish(self, calls: Sequence[Call], frames: int = 0) -> list[CdpResult]:
        """Send commands, draw `frames`, and return the replies; draw more while one does not come."""
        until, heard = time.monotonic() + self.rules.deadline_s, time.monotonic()
        with self.session.begin(calls) as sent:
            for _ in range(frames):
                self._pass(FRAME_MS)
            while not sent.answered(POLL_S):
                leave_if_given_up()
                self._attend()
                if time.monotonic() > until:
                    raise EnvError(
                        f"the page did not answer {calls[0].method} in {self.rules.deadline_s:g} s"
                    )
                if time.monotonic() - heard > STUCK_S:
                    self._pass(FRAME_MS)
                    heard = max(heard, time.monotonic() - STUCK_S + POLL_S)
            return sent.replies()

    def _move_or_drag(self, calls: list[Call]) -> None:
        """Perform one move, press or release, while the pointer may drag an element (HTML drag and drop)."""
        call = calls[0]
        releases = call.params.get("type") == "mouseReleased"
        if not self._drag:
            if releases:
                self._answers(
                    evaluation("0")
                )  # a drag that the moves began has been reported after it
            with self._activity.lock:
                self._drag, self._activity.drag = self._activity.drag, None
            if self._drag:
                self._drag_event("dragEnter", call)
        if not self._drag:
            self._perform(calls)
        elif releases:
            self._drag_event("drop", call)
            self._drag = None
        elif _is_move(call):
            self._drag_event("dragOver", call)

    def _drag_event(self, kind: str, call: Call) -> None:
        place = {name: call.params[name] for name in ("x", "y", "modifiers")}
        self._perform(
            [Call("Input.dispatchDragEvent", {"type": kind, "data": self._drag, **place})]
        )

    def _prepare(self) -> None:
        rules = self.rules
        width, height = rules.size
        guard = files("envs.tools.browser").joinpath("guard.js").read_text(encoding="utf-8")
        calls = [
            Call("Page.enable", {}),
            Call("Runtime.enable", {}),
            Call("Network.enable", {}),
            Call("Log.enable", {}),
            Call("Page.setInterceptFileChooserDialog", {"enabled": True}),
            Call("Page.addScriptToEvaluateOnNewDocument", {"source": f"({guard})({rules.seed})"}),
            Call("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            Call("Input.setInterceptDrags", {"enabled": True}),
            Call(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]},
            ),
            Call(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 0, "mobile": False},
            ),
            Call("Runtime.runIfWaitingForDebugger", {}),
        ]
        self._answers(*calls)
        began_s = rules.began_s or time.time()
        self._set_time("pause", 0.0, initialVirtualTime=began_s)

    def _attend(self) -> None:
        """Answer dialogs and file pickers, and let the windows be attended to that the page opens."""
        self._attend_windows()
        while True:
            try:
                method, params = self._activity.asked.popleft()
            except IndexError:
                return
            if method == "Page.javascriptDialogOpening":
                accept = self.rules.accepts_dialogs or params["type"] in ("alert", "beforeunload")
                answer = {"accept": accept}
                if params["type"] == "prompt" and accept:
                    answer["promptText"] = params.get("defaultPrompt", "")
                self.session.begin([Call("Page.handleJavaScriptDialog", answer)])
            elif method == "Page.fileChooserOpened":
                node = params.get("backendNodeId")
                if node is not None and self.rules.uploads:
                    chosen = list(self.rules.uploads)
                    if params.get("mode") == "selectSingle":
                        chosen = chosen[:1]
                    given = {"files": chosen, "backendNodeId": node}
                    self.session.begin([Call("DOM.setFileInputFiles", given)])

    # --- events ---

    def _hear(self, method: str, params: CdpResult) -> None:
        """Note an event of the page; called in the thread that reads, so that it only writes down."""
        activity = self._activity
        match method:
            case "Emulation.virtualTimeBudgetExpired":
                activity.expired.set()
            case "Network.requestWillBeSent":
                if params.get("type") != "EventSource":
                    now = time.monotonic()
                    with activity.lock:
                        activity.requests[params["requestId"]] = _Request(now, now + LONG_REQUEST_S)
                        activity.addresses[params["requestId"]] = params["request"]["url"]
            case "Network.dataReceived":
                self._answer_goes_on(params["requestId"])
            case "Network.responseReceived":
                self._answer_goes_on(params["requestId"])
                status, address = params["response"]["status"], params["response"]["url"]
                if status >= 400:
                    self._note("request", f"status {status}", address)
            case "Network.loadingFinished" | "Network.loadingFailed":
                with activity.lock:
                    activity.requests.pop(params["requestId"], None)
                    address = activity.addresses.pop(params["requestId"], "")
                if method.endswith("Failed") and not params.get("canceled"):
                    self._note("request", params.get("errorText", "failed"), address)
            case "Page.frameRequestedNavigation" | "Page.frameStartedLoading":
                self._loading_begins(params["frameId"])
            case "Page.frameStoppedLoading" | "Page.frameDetached":
                self._loading_ends(params["frameId"])
            case "Page.javascriptDialogOpening":
                self._note("dialog", f"{params['type']}: {params['message']}", params["url"])
                activity.asked.append((method, params))
            case "Page.fileChooserOpened":
                given = ", ".join(self.rules.uploads) or "cancelled"
                self._note("file", f"file picker: {given}")
                activity.asked.append((method, params))
            case "Input.dragIntercepted":
                activity.drag = params["data"]
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                text = details.get("exception", {}).get("description") or details.get("text", "")
                self._note("exception", text, details.get("url", ""))
            case "Runtime.consoleAPICalled":
                if params["type"] in ("error", "warning", "assert"):
                    text = " ".join(map(_argument, params["args"]))
                    self._note("console", f"{params['type']}: {text}")
            case "Log.entryAdded":
                entry = params["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self._note("console", f"error: {entry['text']}", entry.get("url", ""))

    def _note(self, kind: EventKind, text: str, address: str = "") -> None:
        event = PageEvent(kind, " ".join(text.split())[:LONGEST_EVENT], address[:LONGEST_EVENT])
        with self._activity.lock:
            self._activity.events.append(event)

    def note(self, kind: EventKind, text: str, address: str = "") -> None:
        """Keep an event beside the page's own ones."""
        self._note(kind, text, address)

    def _answer_goes_on(self, request_id: str) -> None:
        """Note that bytes of an answer have come."""
        with self._activity.lock:
            if request := self._activity.requests.get(request_id):
                until = time.monotonic() + ANSWERED_S
                request.waited_for_s = min(until, request.began_s + LONG_REQUEST_S)

    def _loading_begins(self, frame: str) -> None:
        with self._activity.lock:
            self._activity.frames.setdefault(frame, time.monotonic())

    def _loading_ends(self, frame: str) -> None:
        with self._activity.lock:
            self._activity.frames.pop(frame, None)


def _by_moves(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the commands in groups, a move together with the command that delivers it at once."""
    groups: list[list[Call]] = []
    for call in calls:
        if call.params.get("button") == "none" and call.params.get("type") == "mouseReleased":
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _is_move(call: Call) -> bool:
    return call.params.get("type") == "mouseMoved"


def _argument(value: CdpResult) -> str:
    """Return an argument of the console as text."""
    if "value" in value:
        inner = value["value"]
        return inner if isinstance(inner, str) else json.dumps(inner)
    return str(value.get("description", value.get("type", "")))
