"""The browser side of one episode: storage, network, downloads and pages of its own.

Visit       a browser context with its pages; the newest page is the one that is shown
flags_for   the browser's flags for pages of some hosts
reaches     whether an address is on one of some hosts
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.tools.browser.cdp import CdpResult, Chromium
from envs.tools.browser.process import resolving
from envs.tools.browser.tab import PageEvent, Tab, TabRules

MOST_TABS = 8
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
        self.downloads = Path(tempfile.mkdtemp(prefix="dart-downloads-"))
        self._tabs: list[Tab] = []
        self._old_events: list[PageEvent] = []
        self._context = ""
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
            )
            self._open_first()
        except BaseException:
            self.close()
            raise

    @property
    def tab(self) -> Tab:
        """The page that is shown: the newest one that is open."""
        while len(self._tabs) > 1 and not self._tabs[-1].lives:
            closed = self._tabs.pop()
            self._old_events += closed.take_events()
            closed.close()
        return self._tabs[-1]

    def open(self, address: str) -> None:
        """Go to an address in the page that is shown. Raises EnvError if it is not one of the hosts'."""
        if not reaches(address, self._hosts):
            raise EnvError(
                f"{address} is not on a host that the pages may reach: {', '.join(self._hosts)}"
            )
        self.tab.open(address)

    def settle(self, least_ms: float, most_ms: float, patience_s: float) -> bool:
        """Wait until the page that is shown is still, also if that becomes another one meanwhile."""
        while True:
            tab = self.tab
            try:
                still = tab.settle(least_ms, most_ms, patience_s)
            except EnvError:
                if tab.lives or tab is self._tabs[0]:
                    raise
                still = False
            if tab is self.tab:
                return still

    def act(self, action: Action) -> None:
        """Perform an action in the page that is shown."""
        tab = self.tab
        try:
            tab.act(action)
        except EnvError:
            if tab.lives or tab is self._tabs[0]:
                raise  # a window that was closed by the action is no fault

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
        is_ours = params.get("targetInfo", {}).get("browserContextId") == self._context
        if method == "Target.attachedToTarget" and is_ours:
            self._attached.put(params)

    def _attend(self) -> None:
        """Show a window that a page has opened."""
        try:
            params = self._attached.get_nowait()
        except queue.Empty:
            return
        info, opener = params["targetInfo"], self._tabs[-1]
        session = self.browser.adopt(info["targetId"], params["sessionId"])
        if len(self._tabs) >= MOST_TABS:
            self.browser.call("Target.closeTarget", targetId=info["targetId"])
            opener.note("tab", f"closed at once: {MOST_TABS} pages are open", info["url"])
            return
        opener.note("tab", "opened", info["url"])
        self._tabs.append(Tab(session, self.rules, self._attend))


def reaches(address: str, hosts: Sequence[str]) -> bool:
    """Return True if an address is on one of `hosts`."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return any(host in (parts.hostname, f"{parts.hostname}:{port}") for host in hosts)
