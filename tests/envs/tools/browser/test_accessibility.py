"""An explorer's elements of a page are where the page's own DOM says they are. The real browser shows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bus.errors import MissingPartError
from envs.contract.actions import Click, Scroll
from envs.contract.elements import Element, Node, ScreenState, elements_of, state_of
from envs.tools.browser import accessibility
from envs.tools.browser.accessibility import MOST_LEVELS, read_page, route_of
from envs.tools.browser.gui import BrowserGui, GuiOptions
from envs.tools.browser.process import find_chromium

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

WIDTH, HEIGHT = 400, 300

PAGE = """<!doctype html><title>Parts</title>
<style>body { margin: 0; font: 14px sans-serif } .box { overflow: auto; height: 60px }</style>
<nav role="tablist"><button role="tab" aria-selected="true">One</button>
  <button role="tab" aria-selected="false">Two</button></nav>
<div class="box"><button>first</button><br><button>second</button><br><button>third</button><br>
  <button>fourth</button><br><button>fifth</button></div>
<label>Name <input id="name"></label> <input type="checkbox" aria-label="Agree">
<select aria-label="Size"><option>small<option>large</select>
<button disabled>never</button> <a href="#there">a link</a>
<div id="card">a card that listens</div>
<ul id="list"><li>apple</li><li>pear</li></ul>
<button id="under" style="position: absolute; left: 300px; top: 150px">under</button>
<div style="position: absolute; left: 290px; top: 145px; width: 90px; height: 40px; background: #eee"></div>
<iframe style="position: absolute; left: 250px; top: 210px; width: 130px; height: 60px"
  srcdoc="<button style='margin: 10px'>inside</button>"></iframe>
<button id="open" style="position: absolute; left: 300px; top: 110px">open</button>
<dialog>Sure? <button>yes</button></dialog>
<div style="height: 900px"></div>
<script>
  document.querySelector('#card').onclick = () => 1;
  document.querySelector('#list').addEventListener('click', () => 1);
  document.body.addEventListener('click', () => 1);
  document.querySelector('#open').onclick = () => document.querySelector('dialog').showModal();
</script>"""

BOXES = """[...document.querySelectorAll('button, input, select, a, #card, li')].map(each => {
  const box = each.getBoundingClientRect();
  return [each.id || each.ariaLabel || each.textContent, box.left, box.top, box.right, box.bottom];
})"""


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        many = f"<ul>{'<li>x</li>' * 300}</ul>"
        deep = "<div>x" * 3 * MOST_LEVELS + "<button>bottom</button>"
        pages = {"/many": many, "/deep": deep, "/rows": "<li><a href='#'>x</a>" * 3}
        body = pages.get(self.path, PAGE).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module", params=[1.0, 1.5], ids=["as it is", "scaled"])
def gui(host: str, request: pytest.FixtureRequest) -> Iterator[BrowserGui]:
    options = GuiOptions(size=(WIDTH, HEIGHT), scale=request.param)
    instance = BrowserGui(partial(find_chromium, ""), ["127.0.0.1"], options)
    yield instance
    instance.close()


def begin(gui: BrowserGui, host: str, path: str = "/parts?sid=7") -> None:
    gui.begin([host])
    gui.open(f"http://{host}{path}")


def elements(gui: BrowserGui) -> list[Element]:
    return elements_of([read_page(gui.tab)])


def state(gui: BrowserGui) -> ScreenState:
    return state_of(route_of(gui.tab), [read_page(gui.tab)])


def named(gui: BrowserGui, name: str) -> Element:
    return next(each for each in elements(gui) if each.name == name)


def count_nodes(nodes: list[Node]) -> int:
    return sum(1 + count_nodes(node.children) for node in nodes)


def press(gui: BrowserGui, name: str) -> None:
    x, y = named(gui, name).centre
    gui.perform(Click(x=x, y=y))


def test_elements_are_where_the_dom_has_them(gui: BrowserGui, host: str) -> None:
    begin(gui, host)
    scale = gui.options.scale
    boxes: Any = json.loads(str(gui.ask(f"JSON.stringify({BOXES})")))
    of_dom = {name: [edge * scale for edge in edges] for name, *edges in boxes}
    whole = {each.name: each for each in elements(gui)}
    for name in (
        "One",
        "Two",
        "first",
        "second",
        "Agree",
        "Size",
        "a link",
        "apple",
        "pear",
        "open",
    ):
        assert whole[name].box == pytest.approx(of_dom[name], abs=1.0), name
    assert whole["a card that listens"].box == pytest.approx(of_dom["card"], abs=1.0)
    assert whole["Name"].box == pytest.approx(of_dom["name"], abs=1.0)


def test_roles_and_actions_are_those_of_the_contract(gui: BrowserGui, host: str) -> None:
    begin(gui, host)
    kinds = {each.name: (each.role, each.actions) for each in elements(gui)}
    assert kinds["One"] == ("tab", ("click",))
    assert kinds["Name"] == ("field", ("click", "type"))
    assert kinds["Agree"] == ("checkbox", ("click",))
    assert kinds["Size"] == ("combo", ("click",))
    assert kinds["a link"] == ("link", ("click",))
    assert kinds["a card that listens"] == ("area", ("click",))
    assert kinds["apple"] == ("list item", ("click",)), "the list listens for its parts"
    assert kinds["inside"] == ("button", ("click",)), "a document in a frame"
    assert sum(each.actions == ("scroll",) for each in elements(gui)) == 2  # the box and the page


def test_what_cannot_be_reached_is_no_element(gui: BrowserGui, host: str) -> None:
    begin(gui, host)
    names = {each.name for each in elements(gui)}
    assert "never" not in names, "it is disabled"
    assert "under" not in names, "another box covers it"
    assert not {"fourth", "fifth"} & names, "they are scrolled out of sight"
    places = {each.name: each.place for each in elements(gui)}
    x, y = named(gui, "first").centre
    gui.perform(Scroll(x=x, y=y, dy=10))
    rest = {each.name: each.place for each in elements(gui)}
    assert "fifth" in rest
    assert "first" not in rest
    assert rest["apple"] == places["apple"], "scrolling moves no place"


def test_a_page_that_is_scrolled_has_its_elements_where_they_are_now(
    gui: BrowserGui, host: str
) -> None:
    begin(gui, host)
    before = named(gui, "apple").box
    gui.ask("scrollTo(0, 40)")
    gui.look()
    after = named(gui, "apple").box
    moved = round(40 * gui.options.scale)
    assert [before[1] - after[1], before[3] - after[3]] == [moved, moved]
    assert "inside" in {each.name for each in elements(gui)}


def test_a_dialog_covers_what_is_behind_it(gui: BrowserGui, host: str) -> None:
    begin(gui, host)
    closed = state(gui)
    press(gui, "open")
    assert [each.name for each in elements(gui) if "click" in each.actions] == ["yes"]
    assert state(gui).id != closed.id
    begin(gui, host, "/parts?sid=8")
    assert state(gui) == closed, "neither the session nor the visit changes a state"
    press(gui, "a link")
    assert state(gui).route == "/parts#there"


def test_a_page_of_any_length_is_read_in_bounds(
    gui: BrowserGui, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(gui, host, "/many")
    monkeypatch.setattr(accessibility, "MOST_NODES", 200)
    assert 100 < count_nodes(read_page(gui.tab).children) <= 200
    monkeypatch.undo()
    assert count_nodes(read_page(gui.tab).children) > 300
    begin(gui, host, "/deep")
    assert [each.role for each in elements(gui)] == ["view"], "the button is too deep"
    begin(gui, host, "/rows")
    assert [each.role for each in elements(gui)] == ["link"] * 3
