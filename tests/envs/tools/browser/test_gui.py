"""Promises of the browser that an environment plays in: isolation, repetition, limits of the network, faults.

The real browser plays; where it is not installed, these tests are skipped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import EnvError, MissingPartError
from envs.contract.actions import (
    Action,
    Click,
    Drag,
    Goto,
    KeyPress,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)
from envs.tools.browser.cdp import Call
from envs.tools.browser.gui import BrowserGui, GuiOptions
from envs.tools.browser.process import find_chromium
from envs.tools.browser.visit import MOST_TABS, reaches
from tests.envs.tools.browser.site import Site, serving
from tests.waiting import lives, wait_until

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

# A busy machine may be slow: these limits are for what never comes.
OPTIONS = GuiOptions(size=(420, 320), patience_s=600.0, deadline_s=600.0)


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as site:
        yield site


@pytest.fixture(scope="module")
def shared_gui() -> Iterator[BrowserGui]:
    gui = BrowserGui(find_chromium, ["127.0.0.1", "localhost"], OPTIONS)
    yield gui
    gui.close()


@pytest.fixture
def gui(shared_gui: BrowserGui, site: Site) -> BrowserGui:
    begin(shared_gui, site)
    return shared_gui


def begin(gui: BrowserGui, site: Site, path: str = "", **rules: object) -> None:
    gui.begin([site.host], **rules)  # type: ignore[arg-type]
    gui.open(site.address + path)


def at(gui: BrowserGui, name: str) -> tuple[int, int]:
    box = gui.ask(
        f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
        f"(document.getElementById({name!r}).getBoundingClientRect())"
    )
    assert isinstance(box, list)
    return round(box[0]), round(box[1])


def press(gui: BrowserGui, name: str) -> bytes:
    x, y = at(gui, name)
    return gui.perform(Click(x=x, y=y)).screenshot


def play(gui: BrowserGui, *actions: Action) -> bytes:
    return [gui.perform(action).screenshot for action in actions][-1]


# --- nothing is carried over -------------------------------------------------------------------------


def test_storage_workers_downloads_and_clipboard_of_an_episode_end_with_it(
    gui: BrowserGui, site: Site
) -> None:
    gui.ask("localStorage.a = 1, sessionStorage.a = 1, document.cookie = 'a=1; max-age=9999'")
    gui.ask("new Promise((done) => { indexedDB.open('base').onsuccess = () => done(0); })")
    gui.ask("caches.open('cache').then(() => 0)")
    gui.ask("navigator.serviceWorker.register('/worker.js').then(() => 0)")
    press(gui, "field")
    play(gui, Type(text="secret"), KeyPress(keys=["ctrl", "a"]), KeyPress(keys=["ctrl", "c"]))
    press(gui, "area")
    play(gui, KeyPress(keys=["ctrl", "v"]))
    assert gui.ask("area.value") == "secret"
    press(gui, "save")
    downloads = gui.visit.downloads
    assert (downloads / "report.csv").read_text() == "a,b\n1,2\n"
    assert [event.text for event in gui.take_events() if event.kind == "download"] == ["report.csv"]

    begin(gui, site)
    assert not downloads.exists()
    assert list(gui.visit.downloads.iterdir()) == []
    press(gui, "area")
    play(gui, KeyPress(keys=["ctrl", "v"]))
    assert gui.ask(
        """(async () => [localStorage.length, sessionStorage.length, document.cookie, area.value,
        (await indexedDB.databases()).length, (await caches.keys()).length,
        (await navigator.serviceWorker.getRegistrations()).length])()"""
    ) == [0, 0, "", "", 0, 0, 0]


# --- the same each time -----------------------------------------------------------------------------


def test_an_episode_repeats_pixel_by_pixel(gui: BrowserGui, site: Site) -> None:
    def episode(slow_s: float) -> list[bytes]:
        site.slow_s = slow_s
        begin(gui, site, began_s=1_700_000_000.0)
        (x, y), list_at = at(gui, "field"), at(gui, "list")
        actions = [Click(x=x, y=y), Type(text="Hello"), TripleClick(x=x, y=y), Wait(seconds=3)]
        screens = [gui.look().screenshot, *(play(gui, action) for action in actions)]
        screens.append(play(gui, Click(x=list_at[0], y=list_at[1])))
        screens.append(play(gui, KeyPress(keys=["down"]), KeyPress(keys=["enter"])))
        screens.append(play(gui, Scroll(x=200, y=200, dy=5), Scroll(x=200, y=200, dy=-50)))
        screens.append(press(gui, "date"))
        press(gui, "load")
        gui.ask("document.title = document.title.slice(0, -3)")  # to some 10 ms
        now = gui.ask(
            "[document.title, Date.now(), Intl.DateTimeFormat().resolvedOptions().timeZone]"
        )
        return [*screens, str(now).encode()]

    first = episode(0.0)
    assert len(set(first[:-1])) > 5
    assert episode(0.4) == first  # a slow server changes nothing: time stands still meanwhile


def test_a_page_has_the_clock_and_the_random_numbers_of_its_episode(
    gui: BrowserGui, site: Site
) -> None:
    def drawn(seed: int) -> object:
        begin(gui, site, seed=seed, began_s=1_700_000_000.0)
        return gui.ask("[Math.random(), Math.random(), Math.floor(Date.now() / 1000)]")

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first
    assert isinstance(first, list)
    assert 1_700_000_000 <= first[2] <= 1_700_000_010
    assert all(0 <= value < 1 for value in first[:2])


def test_a_step_takes_its_time_and_no_more_beside_an_endless_animation(gui: BrowserGui) -> None:
    before = gui.ask("performance.now()")
    play(gui, Move(x=5, y=5))
    after = gui.ask("performance.now()")
    assert isinstance(before, float | int)
    assert isinstance(after, float | int)
    assert round(after - before) == 525  # 500 ms and a frame for the screenshot


def test_dialogs_are_answered_by_the_rules(gui: BrowserGui, site: Site) -> None:
    for accepts, titles in ((True, ["true", "told", "Ann"]), (False, ["false", "told", "null"])):
        begin(gui, site, accepts_dialogs=accepts)
        seen = []
        for name in ("ask", "tell", "name"):
            press(gui, name)
            seen.append(gui.ask("document.title"))
        assert seen == titles
        events = [event.text for event in gui.take_events()]
        assert events == ["confirm: sure?", "alert: done", "prompt: name?"]


def test_a_file_picker_gets_the_files_of_the_episode_or_is_cancelled(
    gui: BrowserGui, site: Site, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("a note")
    press(gui, "file")
    assert gui.ask("file.files.length") == 0
    begin(gui, site, uploads=[str(note)])
    press(gui, "file")
    assert gui.ask("file.files[0].text()") == "a note"


def test_a_list_opens_inside_the_page_also_in_a_shadow_root(gui: BrowserGui) -> None:
    closed = gui.look().screenshot
    opened = press(gui, "list")
    assert opened != closed
    play(gui, KeyPress(keys=["down"]), KeyPress(keys=["enter"]))
    assert gui.ask("list.value") == "two"
    gui.ask(
        """void (document.body.prepend(Object.assign(document.createElement('div'), { id: 'host', style: 'display: inline-block' })),
        host.attachShadow({ mode: 'open' }).innerHTML = '<select><option>x<option>y</select>')"""
    )
    press(gui, "host")
    play(gui, KeyPress(keys=["down"]), KeyPress(keys=["enter"]))
    assert gui.ask("host.shadowRoot.firstChild.value") == "y"


# --- windows, history, drags --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "tab"])
def test_a_new_window_is_shown_and_runs_until_it_closes(gui: BrowserGui, name: str) -> None:
    press(gui, name)
    assert gui.ask("document.title") == "second"
    count = gui.ask("count")
    play(gui, Wait(seconds=1))
    assert isinstance(count, int)
    assert (
        gui.ask("count") == count + 41
    )  # a frame for each 25 ms of its time, and one for the screenshot
    press(gui, "close")
    assert gui.ask("document.title") == "home"
    assert [event.kind for event in gui.take_events()] == ["tab"]


def test_a_page_behind_a_window_may_ask_too(gui: BrowserGui) -> None:
    gui.ask("void setTimeout(() => { document.title = confirm('behind?'); }, 900)")
    press(gui, "window")
    play(gui, Wait(seconds=2))
    assert gui.ask("[document.title, opener.document.title]") == ["second", "true"]
    press(gui, "close")
    assert gui.ask("document.title") == "true"


def test_a_frame_of_another_host_has_the_clock_and_rules_of_its_page(
    gui: BrowserGui, site: Site
) -> None:
    with serving() as other:
        hosts = [site.host, other.host.replace("127.0.0.1", "localhost")]
        gui.begin(hosts, began_s=1_700_000_000.0, seed=3)
        gui.open(site.address)
        first = gui.ask("Math.random()")
        gui.begin(hosts, began_s=1_700_000_000.0, seed=3)
        gui.open(f"{site.address}framing?to=http://{hosts[1]}/reporting")
        play(gui, Wait(seconds=1), Click(x=60, y=60))
        assert gui.ask("[report.random, report.year, report.clicks]") == [first, 2023, 1]


def test_only_so_many_windows_open(gui: BrowserGui) -> None:
    gui.ask("void Array.from({ length: 12 }, () => window.open('/second'))")
    play(gui, Wait(seconds=1))
    texts = [event.text for event in gui.take_events() if event.kind == "tab"]
    assert texts.count("opened") == MOST_TABS - 1
    assert len(texts) == 12


def test_history_keys_go_back_and_forward_and_load_anew(gui: BrowserGui) -> None:
    def title_after(*keys: str) -> object:
        play(gui, KeyPress(keys=list(keys)))
        return gui.ask("document.title")

    press(gui, "next")
    assert gui.ask("document.title") == "second"
    assert title_after("alt", "left") == "home"
    assert title_after("alt", "left") == "home"  # there is nothing before the first page
    assert title_after("alt", "right") == "second"
    gui.ask("document.title = 'changed'")
    assert title_after("f5") == "second"


def test_an_element_is_dragged_to_another(gui: BrowserGui) -> None:
    start, end = at(gui, "from"), at(gui, "to")
    play(gui, Drag(path=[start, end]))
    assert gui.ask("to.textContent") == "card"
    gui.ask("to.textContent = ''")
    play(gui, MouseDown(x=start[0], y=start[1]), Move(x=start[0] + 20, y=start[1] + 3))
    play(gui, Move(x=end[0], y=end[1]), MouseUp(x=end[0], y=end[1]))
    assert gui.ask("to.textContent") == "card"
    press(gui, "field")  # the drag is over
    play(gui, Type(text="x"))
    assert gui.ask("field.value") == "x"


# --- the network --------------------------------------------------------------------------------------


_LOADS = """new Promise((yes, no) => {{
  const source = {make};
  source.{event} = yes;
  source.onerror = no;
}})"""


def test_a_page_reaches_the_named_hosts_only(gui: BrowserGui, site: Site) -> None:
    with serving() as other:
        port = other.host.partition(":")[2]
        hosts = [other.host, f"localhost:{port}", f"[::1]:{port}", "elsewhere.example"]
        for host in hosts:
            address = f"'http://{host}/'"
            ways = [
                f"fetch({address}, {{ mode: 'no-cors' }})",
                f"fetch('/redirect?to=' + {address}, {{ mode: 'no-cors' }})",
                _LOADS.format(make=f"new WebSocket('ws://{host}/')", event="onopen"),
                _LOADS.format(
                    make=f"Object.assign(new Image(), {{ src: {address} }})", event="onload"
                ),
                _LOADS.format(make=f"new EventSource('http://{host}/events')", event="onopen"),
            ]
            for way in ways:
                assert gui.ask(f"{way}.then(() => 'reached', () => 'refused')") == "refused", way
            gui.ask(f"navigator.sendBeacon('http://{host}/')")
        assert gui.ask("typeof RTCPeerConnection + typeof WebTransport") == "undefinedundefined"
        gui.ask(f"void (location.href = 'http://{other.host}/')")
        play(gui, Wait(seconds=1))
        play(gui, Goto(url=f"http://{other.host}/"), Goto(url="file:///etc/passwd"))
        assert other.paths == []
    play(gui, Goto(url=site.address))
    assert gui.ask("document.title") == "home"


def test_a_host_may_be_named_with_or_without_its_port() -> None:
    assert reaches("http://a.example/x", ["a.example"])
    assert reaches("https://a.example/x", ["a.example:443"])
    assert not reaches("https://a.example/x", ["a.example:80"])
    assert not reaches("http://b.a.example/", ["a.example"])
    assert not reaches("file:///a.example", ["a.example"])


# --- faults cost one episode --------------------------------------------------------------------------


def hurry(gui: BrowserGui) -> None:
    """Wait for what never comes for 3 s only, from here on."""
    gui.tab.rules = replace(gui.tab.rules, deadline_s=3.0)
    gui.options = replace(gui.options, deadline_s=3.0)


def assert_next_episode_plays(gui: BrowserGui, site: Site) -> None:
    with pytest.raises(EnvError, match="call reset first"):
        gui.look()
    begin(gui, site)
    press(gui, "ask")
    assert gui.ask("document.title") == "true"


def test_a_page_that_crashes_is_an_error_and_the_next_episode_plays(
    gui: BrowserGui, site: Site
) -> None:
    browser = gui.visit.browser
    with (
        gui.tab.session.begin([Call("Page.crash", {})]) as sent,
        pytest.raises(EnvError, match="crashed"),
    ):
        sent.replies(600.0)
    with pytest.raises(EnvError, match="crashed"):
        gui.perform(Wait(seconds=1))
    assert not lives(browser.pid)
    assert_next_episode_plays(gui, site)


def test_a_browser_that_is_killed_is_an_error_and_the_next_episode_plays(
    gui: BrowserGui, site: Site
) -> None:
    pid = gui.visit.browser.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lives(pid))
    with pytest.raises(EnvError, match=r"Chromium (is gone|ended)"):
        gui.perform(Wait(seconds=1))
    assert_next_episode_plays(gui, site)


@pytest.mark.parametrize(
    ("script", "error"),
    [("for (;;) {}", "page"), ("for (;;) alert('again')", "page")],
)
def test_a_page_that_hangs_is_an_error_and_the_next_episode_plays(
    site: Site, script: str, error: str
) -> None:
    gui = BrowserGui(find_chromium, ["127.0.0.1"], OPTIONS)
    try:
        begin(gui, site)
        hurry(gui)
        gui.ask(f"void setTimeout(() => {{ {script} }}, 100)")
        pid = gui.visit.browser.pid
        with pytest.raises(EnvError, match=f"{error} .* in 3 s"):
            gui.perform(Wait(seconds=1))
        assert not lives(pid)
        with pytest.raises(EnvError, match="call reset first"):
            gui.look()
    finally:
        gui.close()


def test_a_server_that_does_not_answer_or_answers_with_an_error_is_an_error(site: Site) -> None:
    gui = BrowserGui(find_chromium, ["127.0.0.1"], OPTIONS)
    try:
        gui.begin([site.host])
        hurry(gui)
        with pytest.raises(EnvError, match=r"the page did not answer Page.navigate in 3 s"):
            gui.open(f"{site.address}never")
        gui.options = OPTIONS
        gui.begin([site.host])
        with pytest.raises(EnvError, match=r"/broken has status 500"):
            gui.open(f"{site.address}broken")
        gui.begin([site.host])
        hurry(gui)
        with pytest.raises(EnvError, match=r"the page is not ready in 3 s: 1 > 2 is not true"):
            gui.open(site.address, "1 > 2")
    finally:
        gui.close()


def test_requests_that_stay_open_do_not_stop_a_page(gui: BrowserGui, site: Site) -> None:
    gui.options = replace(OPTIONS, patience_s=1.0)
    begin(gui, site)
    gui.options = OPTIONS
    gui.ask(
        """void (new EventSource('/events').onmessage = (event) => { document.title = event.data; },
        fetch('/never'))"""
    )
    play(gui, Wait(seconds=1), Wait(seconds=5))
    assert gui.ask("document.title") == "hello"
    before = gui.ask("performance.now()")
    play(gui, Wait(seconds=5))
    after = gui.ask("performance.now()")
    assert isinstance(before, float | int)
    assert isinstance(after, float | int)
    assert round(after - before) == 5025


def test_messages_of_a_socket_reach_the_page(gui: BrowserGui, site: Site) -> None:
    gui.ask(
        f"""void (window.socket = new WebSocket('ws://{site.host}/socket'),
        socket.onopen = () => socket.send('hello'),
        socket.onmessage = ({{ data }}) => {{ document.title = data; }})"""
    )
    wait_until(lambda: play(gui, Wait(seconds=0.1)) and gui.ask("document.title") == "hello")


def test_what_a_page_reports_is_noted(gui: BrowserGui) -> None:
    gui.ask(
        """void (console.error('bad', { a: 1 }), console.log('fine'), fetch('/none'),
        setTimeout(() => { throw new Error('thrown'); }, 10))"""
    )
    play(gui, Wait(seconds=1))
    events = [(event.kind, event.text) for event in gui.take_events()]
    assert ("console", "error: bad Object") in events
    assert ("request", "status 404") in events
    assert [text.splitlines()[0][:13] for kind, text in events if kind == "exception"] == [
        "Error: thrown"
    ]
    assert gui.take_events() == []
