"""One page of a browser, whose time passes and which draws only on command.

Tab         opens addresses, acts, waits until the page is still, takes screenshots, runs scripts
TabRules    what every page of an episode gets: size, clock, answers to dialogs

The page's clock is Chromium's virtual time (Emulation.setVirtualTimePolicy). It stands still while the policy
thinks and while requests are under way, and otherwise runs as fast as the page computes. A page that asks its
server for something is therefore at the same point of its time, to some 10 ms, however slow server and host
are.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from bus.errors import EnvError
from envs.contract.actions import Action, Type
from envs.contract.options import ImageEncoding
from envs.contract.queueing import leave_if_given_up
from envs.contract.screenshots import SCREEN_JPEG_QUALITY
from envs.tools.browser.activity import PageActivity, PageEvent
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
LOST_S = 0.02  # without word of the time that was granted to a document that has been left
STUCK_S = 0.5  # without an answer that needs no frame, after which frames are drawn for it
EMPTY = "about:blank"  # the page that is there before the first address
STARVATION = 10_000  # tasks that a page may run without its clock moving on


@dataclass(frozen=True)
class TabRules:
    """What every page of an episode gets."""

    size: tuple[int, int]  # CSS pixels
    scale: float = 1.0  # pixels of the screenshot per CSS pixel
    encoding: ImageEncoding = "png"
    deadline_s: float = 20.0  # the longest answer of the page
    patience_s: float = 5.0  # seconds after which a request stays open, and is not waited for
    began_s: float = 0.0
    """What the page's clock shows at first, seconds since 1970; 0: the present time."""
    seed: int = 0  # of the page's own random numbers
    accepts_dialogs: bool = True  # whether confirm and prompt are answered with OK
    uploads: tuple[str, ...] = ()  # the files that a file picker gets; none: it is cancelled
    phone: str = ""
    """The user agent of a phone with a touch screen, and with no scroll bars; empty: a computer with a mouse."""


class Tab:
    """A page in a browser context. One thread uses it; its methods raise EnvError if the page is broken."""

    def __init__(
        self,
        session: PageSession,
        rules: TabRules,
        attend: Callable[[], None],
    ) -> None:
        """Prepare the page of `session`, which waits for a debugger, and let it begin.

        `attend` is called whenever the page is waited for; it takes care of new and other windows.
        """
        self.session = session
        self.rules = rules
        self._browser: Chromium = session.browser
        self._attend_windows = attend
        self.activity = PageActivity(", ".join(rules.uploads), rules.patience_s)
        self._input = PageInput(rules.scale)
        self._base_ms, self._passed_ms, self._last_frame_ms = 0.0, 0.0, 0.0
        self._drag: CdpResult | None = None  # what the pointer drags from one element to another
        self._calm = 0  # frames in a row without a change
        self._shot: dict[str, Any] = {"format": rules.encoding, "optimizeForSpeed": True}
        if rules.encoding == "jpeg":
            self._shot["quality"] = SCREEN_JPEG_QUALITY
        self._browser.listen(session.id, self.activity.hear)
        self._prepare()

    # --- what the environment asks for ---

    def open(self, address: str) -> None:
        """Go to an address. Raises EnvError if it cannot be loaded."""
        self.activity.document_status = 0
        reply = self._answers(Call("Page.navigate", {"url": address}))[0]
        if error := reply.get("errorText"):
            raise EnvError(f"{address} cannot be loaded: {error}")
        if (status := self.activity.document_status) >= 400:
            raise EnvError(f"{address} has status {status}")

    def move(self, entries: int) -> None:
        """Go so many entries forward in the page's history; 0 loads it anew. Nothing lies beyond its ends."""
        moves = self.activity.moves
        if entries == 0:
            self._answers(Call("Page.reload", {}))
        else:
            history = self._answers(Call("Page.getNavigationHistory", {}))[0]
            at = history["currentIndex"] + entries
            if not 0 <= at < len(history["entries"]) or history["entries"][at]["url"] == EMPTY:
                return
            entry = {"entryId": history["entries"][at]["id"]}
            self._answers(Call("Page.navigateToHistoryEntry", entry))
        until = time.monotonic() + self.rules.patience_s
        while self.activity.moves == moves and time.monotonic() < until:
            time.sleep(POLL_S)
            leave_if_given_up()
            self._attend()

    def settle(self, least_ms: float, most_ms: float) -> bool:
        """Let `least_ms` of the page's time pass, and more until it is still, at most `most_ms`.

        A page is still if no request and no document is under way and `CALM_FRAMES` frames brought no change.
        All of this takes the deadline of the page at most. Returns False if the page is not still.
        """
        until, passed = time.monotonic() + self.rules.deadline_s, 0.0
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
        elif isinstance(action, Type):
            self._type(_by_strokes(calls))
        else:
            self._perform(calls)
        # After an input the page does nothing but that until a frame is drawn: answers to its requests wait.
        self._frame()

    def _type(self, strokes: list[list[Call]]) -> None:
        """Perform the strokes of a text.

        A page that saves at every stroke gets the answer to one before the next; otherwise its requests, all
        under way at once, may reach the server in another order.
        """
        until = time.monotonic() + self.rules.deadline_s
        at_once = 1
        while strokes:
            sent_before = self.activity.sent
            self._perform([call for stroke in strokes[:at_once] for call in stroke])
            del strokes[:at_once]
            self._frame()  # until then the page does nothing about answers
            self._pass(FRAME_MS)
            self._await_requests(until)
            at_once = 1 if self.activity.sent > sent_before else 4 * at_once

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
        return self.activity.take_events()

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
        """Let the page's time pass; it stands still while requests are under way that do not stay open."""
        activity, began, granted_s, document = self.activity, time.monotonic(), 0.0, 0
        policy = "advance" if activity.has_open() else "pauseIfNetworkFetchesPending"
        while True:
            now = time.monotonic()
            # What was granted is lost if the page goes to another document meanwhile, and stands still for an
            # answer that the page does not read.
            is_lost = activity.documents != document or activity.has_unread()
            patience_s = LOST_S if is_lost else STUCK_S
            if granted_s == 0.0 or (now - granted_s > patience_s and not activity.is_busy()):
                activity.expired.clear()
                try:
                    self._set_time(policy, ms)
                    granted_s, document = now, activity.documents
                    policy = "advance"
                except DocumentLeftError:
                    time.sleep(POLL_S)
            if activity.expired.wait(5 * POLL_S):
                break
            leave_if_given_up()
            self._attend()
            if now - began > self.rules.deadline_s:
                raise EnvError(
                    f"the page hangs: its time did not pass in {self.rules.deadline_s:g} s"
                )
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
        until = time.monotonic() + self.rules.deadline_s
        while True:
            at = max(self._base_ms + self._passed_ms, self._last_frame_ms + 1.0)
            self._last_frame_ms = at
            params: dict[str, Any] = {"frameTimeTicks": at, "interval": FRAME_MS}
            if shot is not None:
                params["screenshot"] = shot
            try:
                with self._browser.drawing():
                    return self._answers(Call("HeadlessExperimental.beginFrame", params))[0]
            except DocumentLeftError:
                if time.monotonic() > until:
                    raise

    def _await_requests(self, until: float) -> bool:
        """Wait until nothing is under way; return False if something still is at `until`."""
        while self.activity.is_busy():
            self._calm = 0
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
        until, asked_s = time.monotonic() + self.rules.deadline_s, time.monotonic()
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
                if time.monotonic() - asked_s > STUCK_S:
                    self._pass(FRAME_MS)
                    asked_s = max(asked_s, time.monotonic() - STUCK_S + POLL_S)
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
            self._drag = self.activity.take_drag()
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
                {
                    "width": width,
                    "height": height,
                    "deviceScaleFactor": 0,
                    "mobile": bool(rules.phone),
                },
            ),
        ]
        if rules.phone:
            calls += [
                Call("Emulation.setUserAgentOverride", {"userAgent": rules.phone}),
                Call("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 5}),
                Call("Emulation.setScrollbarsHidden", {"hidden": True}),
            ]
        calls.append(Call("Runtime.runIfWaitingForDebugger", {}))
        self._answers(*calls)
        began_s = rules.began_s or time.time()
        self._set_time("pause", 0.0, initialVirtualTime=began_s)

    def _attend(self) -> None:
        """Answer dialogs and file pickers, and let the other windows be attended to."""
        self.answer()
        self._attend_windows()

    def answer(self) -> None:
        """Answer the dialogs and file pickers that the page has opened; returns at once."""
        while True:
            try:
                method, params = self.activity.questions.popleft()
            except IndexError:
                return
            if method == "Page.javascriptDialogOpening":
                accept = self.rules.accepts_dialogs or params["type"] in ("alert", "beforeunload")
                answer = {"accept": accept}
                if params["type"] == "prompt" and accept:
                    answer["promptText"] = params.get("defaultPrompt", "")
                self.session.begin([Call("Page.handleJavaScriptDialog", answer)]).close()
            elif method == "Page.fileChooserOpened":
                node = params.get("backendNodeId")
                if node is not None and self.rules.uploads:
                    paths = list(self.rules.uploads)
                    if params.get("mode") == "selectSingle":
                        paths = paths[:1]
                    arguments = {"files": paths, "backendNodeId": node}
                    self.session.begin([Call("DOM.setFileInputFiles", arguments)]).close()


def _by_moves(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the commands in groups, a move together with the command that delivers it at once."""
    groups: list[list[Call]] = []
    for call in calls:
        if call.params.get("button") == "none" and call.params.get("type") == "mouseReleased":
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _by_strokes(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the commands that type a text in groups, one for each character."""
    strokes: list[list[Call]] = [[]]
    for call in calls:
        strokes[-1].append(call)
        if call.params.get("type") == "keyUp" or call.method == "Input.insertText":
            strokes.append([])
    return [stroke for stroke in strokes if stroke]


def _is_move(call: Call) -> bool:
    return call.params.get("type") == "mouseMoved"
