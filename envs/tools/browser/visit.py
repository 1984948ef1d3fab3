"""The browser side of one episode: storage, network, downloads and pages of its own.

Visit       a browser context with its pages; the newest page is the one that is shown
flags_for   the browser's flags for pages of some hosts
reaches     whether an address is on one of some hosts
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from bus.errors import EnvError
from envs.contract.actions import Action, KeyPress
from envs.contract.queueing import leave_if_given_up
from envs.tools.browser.activity import PageEvent
from envs.tools.browser.cdp import CdpResult, Chromium
from envs.tools.browser.process import resolving
from envs.tools.browser.tab import POLL_S, Tab, TabRules
from envs.tools.inputs import canonical

MOST_TABS = 8
_MOVES = {("alt", "left"): -1, ("alt", "right"): 1, ("f5",): 0, ("ctrl", "r"): 0}
"""Keys of the browser -> the entries of its history to go forward; 0 loads the page anew."""
NOWHERE = "http://nowhere.invalid:1"
"""The proxy of all hosts but the named ones: its name resolves to nothing, so that every request fails."""

PERMISSIONS = ("clipboardReadWrite", "clipboardSanitizedWrite")
"""What a page may do without being asked; everything else is refused without a prompt."""

EMPTY_CLIPBOARD = """(() => {
  const empty = (event) => { event.clipboardData.setData("text/plain", ""); event.preventDefault(); };
  document.addEventListener("copy", empty, { once: true });
  document.execCommand("copy");
})()"""
"""A script that empties the clipboard, which all contexts of a browser share."""


def flags_for(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the browser's flags for pages of these hosts ("name" or "name:port")."""
    return (
        resolving(host.partition(":")[0] for host in hosts),
        "--disable-site-isolation-trials",  # frames of other sites have the page's clock
        "--disable-features=IsolateOrigins,site-per-process",
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--disable-dev-shm-usage",
    )


class Visit:
    """A browser context of one episode. One thread uses it; its methods raise EnvError if it is broken."""

    def __init__(self, browser: Chromium, rules: TabRules, hosts: Sequence[str]) -> None:
        """Make the context; its pages reach `hosts` only, each "name" or "name:port"."""
        self.browser = browser
        self.rules = rules
        self._hosts = tuple(hosts)
        self.downloads = Path(tempfile.mkdtemp(prefix="downloads-", dir=browser.folder))
        self._tabs: list[Tab] = []
        self._old_events: list[PageEvent] = []
        self._context = ""
        self._crashed = False
        self._opening = 0  # windows that begin
        self._downloading: set[str] = set()  # the downloads that are not complete
        self._attached: queue.SimpleQueue[CdpResult] = queue.SimpleQueue()  # pages that wait for us
        try:
            browser.listen("", self._hear)
            browser.call(
                "Target.setAutoAttach",
                autoAttach=True,
                waitForDebuggerOnStart=True,
                flatten=True,
                filter=[{"type": "page"}, {"exclude": True}],
            )
            # Of the rules in a bypass list the last that fits counts; the first takes loopback addresses,
            # which are not proxied by default, out.
            self._context = browser.call(
                "Target.createBrowserContext",
                disposeOnDetach=True,
                proxyServer=NOWHERE,
                proxyBypassList=";".join(("<-loopback>", *self._hosts)),
            )["browserContextId"]
            context = self._context
            browser.call(
                "Browser.grantPermissions", permissions=list(PERMISSIONS), browserContextId=context
            )
            browser.call(
                "Browser.setDownloadBehavior",
                behavior="allow",
                browserContextId=context,
                downloadPath=str(self.downloads),
                eventsEnabled=True,
            )
            self._open_first()
        except BaseException:
            self.close()
            raise

    @property
    def tab(self) -> Tab:
        """The page that is shown: the newest one that is open. Raises EnvError if a page has crashed."""
        while len(self._tabs) > 1 and not self._tabs[-1].lives:
            closed = self._tabs.pop()
            self._old_events += closed.take_events()
            closed.close()
        if self._crashed:
            raise EnvError("the page crashed")
        return self._tabs[-1]

    def open(self, address: str) -> None:
        """Go to an address in the page that is shown. Raises EnvError if it is not one of the hosts'."""
        if not reaches(address, self._hosts):
            raise EnvError(
                f"{address} is not on a host that the pages may reach: {', '.join(self._hosts)}"
            )
        self.tab.open(address)

    def settle(self, least_ms: float, most_ms: float) -> bool:
        """Wait until the page that is shown is still, also if that becomes another one meanwhile.

        Downloads are waited for, too, as long as for a request.
        """
        while True:
            tab = self.tab
            try:
                still = tab.settle(least_ms, most_ms)
            except EnvError:
                if not self._has_closed(tab):
                    raise
                still = False
            if tab is self.tab:
                break
        until = time.monotonic() + self.rules.patience_s
        while self._downloading and time.monotonic() < until:
            time.sleep(POLL_S)
            leave_if_given_up()
        return still and not self._downloading

    def act(self, action: Action) -> None:
        """Perform an action in the page that is shown.

        Some keys are the browser's: alt+left and alt+right go back and forward, f5 and ctrl+r load the page
        anew.
        """
        tab = self.tab
        try:
            keys = tuple(map(canonical, action.keys)) if isinstance(action, KeyPress) else ()
            if keys in _MOVES:
                tab.move(_MOVES[keys])
            else:
                tab.act(action)
        except EnvError:
            if not self._has_closed(tab):
                raise

    def _has_closed(self, tab: Tab) -> bool:
        """Return True if a window has closed itself, which is no fault; the first page must stay."""
        return not (self._crashed or self.browser.end_reason or tab.lives or tab is self._tabs[0])

    def look(self) -> bytes:
        """Return a screenshot of the page that is shown."""
        return self.tab.look()

    def take_events(self) -> list[PageEvent]:
        """Return what the pages did beside their screens since the last call."""
        events, self._old_events = self._old_events, []
        return events + [event for tab in self._tabs for event in tab.take_events()]

    def close(self) -> None:
        """Close all pages and forget their storage and downloads; may be called twice."""
        for tab in self._tabs:
            tab.close()
        context, self._context = self._context, ""
        if context:
            with suppress(EnvError):  # closed already, with its browser
                self.browser.call("Target.disposeBrowserContext", browserContextId=context)
        shutil.rmtree(self.downloads, ignore_errors=True)

    def _open_first(self) -> None:
        width, height = self.rules.size
        target = self.browser.call(
            "Target.createTarget",
            url="about:blank",
            browserContextId=self._context,
            width=width,
            height=height,
            enableBeginFrameControl=True,
        )["targetId"]
        try:
            info = self._attached.get(timeout=self.rules.deadline_s)
        except queue.Empty:
            raise EnvError(f"Chromium opened no page in {self.rules.deadline_s:g} s") from None
        tab = Tab(self.browser.adopt(target, info["sessionId"]), self.rules, self._attend)
        self._tabs.append(tab)
        tab.session.call("Runtime.evaluate", expression=EMPTY_CLIPBOARD, userGesture=True)

    def _hear(self, method: str, params: CdpResult) -> None:
        """Note an event of the browser; called in the thread that reads."""
        match method:
            case "Target.attachedToTarget":
                if params["targetInfo"].get("browserContextId") == self._context:
                    self._attached.put(params)
            case "Target.targetCrashed":
                self._crashed = True
            case "Browser.downloadWillBegin":
                self._downloading.add(params["guid"])
                self._tabs[-1].activity.note("download", params["suggestedFilename"], params["url"])
            case "Browser.downloadProgress" if params["state"] != "inProgress":
                self._downloading.discard(params["guid"])

    def _attend(self) -> None:
        """Show a window that a page has opened, and answer the dialogs of pages that are not shown."""
        for tab in self._tabs:
            if tab.lives:
                tab.answer()
        try:
            params = self._attached.get_nowait()
        except queue.Empty:
            return
        info, opener = params["targetInfo"], self._tabs[-1]
        session = self.browser.adopt(info["targetId"], params["sessionId"])
        if len(self._tabs) + self._opening >= MOST_TABS:
            # As long as it waits for a debugger, so does its opener, and it does not close.
            session.call("Runtime.runIfWaitingForDebugger")
            self.browser.call("Target.closeTarget", targetId=info["targetId"])
            opener.activity.note("tab", f"closed at once: {MOST_TABS} pages are open", info["url"])
            return
        opener.activity.note("tab", "opened", info["url"])
        self._opening += 1
        try:
            tab = Tab(
                session, self.rules, self._attend
            )  # meanwhile its opener may open further ones
        finally:
            self._opening -= 1
        self._tabs.append(tab)


def reaches(address: str, hosts: Sequence[str]) -> bool:
    """Return True if an address is on one of `hosts`."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return any(host in (parts.hostname, f"{parts.hostname}:{port}") for host in hosts)
