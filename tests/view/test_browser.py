"""The viewer in a real browser: actions stand where they were, and hostile text does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import MissingPartError
from dart_cli.data.store.open import open_store
from dart_cli.view.server import write_file
from envs.contract.blobs import content_hash
from envs.tools.browser.process import find_chromium
from tests.data.parts import make_ledger, small_config
from tests.view.browsing import WIDTH, Browser, browsing
from tests.view.parts import Bones, Server, play_shown, png, serving
from tests.view.test_compare import play_run
from tests.view.test_evaluations import keep
from tests.view.test_graph_pages import explored
from tests.view.test_hostile import BENIGN, HOSTILE, play_words


def _missing() -> str:
    try:
        find_chromium()
    except MissingPartError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "it is there")

PAGES = ("/", "/tasks", "/tasks/mini/click", "/groups", "/groups/g000001", "/trajectories")
TRAJECTORY = "/trajectories/g000001-00"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run_dir = tmp_path_factory.mktemp("hostile") / "run"
    play_words(run_dir, HOSTILE)
    with serving(run_dir) as server:
        yield server


@pytest.fixture(scope="module")
def benign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run_dir = tmp_path_factory.mktemp("benign") / "run"
    play_words(run_dir, BENIGN)
    with serving(run_dir) as server:
        yield server


@pytest.mark.parametrize("path", [*PAGES, TRAJECTORY])
def test_a_browser_makes_the_same_elements_of_hostile_text_and_runs_nothing(
    path: str, browser: Browser, hostile: Server, benign: Server
) -> None:
    found = browser.open(f"http://127.0.0.1:{hostile.port}{path}")
    assert found.ran == []
    assert found.title != "taken"
    assert found.bones == browser.open(f"http://127.0.0.1:{benign.port}{path}").bones


def test_an_exported_hostile_trajectory_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    name = play_words(tmp_path / "run", HOSTILE)
    write_file(tmp_path / "run", tmp_path / "page.html", name)
    found = browser.open((tmp_path / "page.html").as_uri())
    assert found.ran == []
    assert name in found.title
    assert not [each for each in found.bones if each.startswith(("SCRIPT", "IFRAME", "OBJECT"))]


def test_the_same_words_without_escaping_do_run(browser: Browser, tmp_path: Path) -> None:
    """What the tests above would see if they had something to see."""
    (tmp_path / "page.html").write_text(f'<p title="{HOSTILE}">', encoding="utf-8")
    found = browser.open((tmp_path / "page.html").as_uri())
    assert "alert" in found.ran
    assert found.title == "taken"


@pytest.mark.parametrize("anchor", ["", "#step-0"])  # as it is in the film, and enlarged
@pytest.mark.parametrize(
    ("action", "selector", "at"),
    [
        ({"kind": "click", "x": 300, "y": 60, "button": "left"}, "circle.mark", (300, 60)),
        ({"kind": "double_click", "x": 7, "y": 231}, "circle.mark", (7, 231)),
        ({"kind": "triple_click", "x": 7, "y": 231}, "circle.mark", (7, 231)),
        ({"kind": "mouse_down", "x": 200, "y": 100, "button": "left"}, "path.mark", (200, 106.25)),
        ({"kind": "mouse_up", "x": 200, "y": 100, "button": "left"}, "path.mark", (200, 93.75)),
        ({"kind": "drag", "path": [[20, 40], [120, 90]]}, "path.mark", (70, 65)),
    ],
)
def test_an_action_is_drawn_on_the_screen_where_it_was(
    anchor: str,
    action: dict[str, object],
    selector: str,
    at: tuple[int, int],
    browser: Browser,
    tmp_path: Path,
) -> None:
    config, image = small_config(tmp_path / "run"), png(400, 240)
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        name = play_shown(
            make_ledger(config, store),
            0,
            steps=1,
            action=action,
            screenshot=image,
            image_hashes=[content_hash(image)],
        )
        store.commit()
        browser.open(f"http://127.0.0.1:{server.port}/trajectories/{name}{anchor}")
        left, top, width, height = browser.box("#step-0 .screen image")
        x, y, across, down = browser.box(f"#step-0 .screen {selector}")
    assert width / height == pytest.approx(400 / 240, abs=0.01)
    assert width > (900 if anchor else 200)
    assert (x + across / 2 - left) / width * 400 == pytest.approx(at[0], abs=0.5)
    assert (y + down / 2 - top) / height * 240 == pytest.approx(at[1], abs=0.5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two runs of a folder, with words of every length; the pages of one are below /runs/a."""
    folder = tmp_path_factory.mktemp("runs")
    for name, minutes in (("a", 1), ("a-run-of-another-name", 5)):
        play_run(folder / name, 3, minutes=minutes, lr=minutes / 10)
        keep(
            folder / name, "one", "ppffpi", "a reason of several words, as an environment gives it"
        )
        keep(folder / name, "two", "pppppp", "a reason")
    (folder / "a" / "notes.md").write_text("A note of several words. " * 20, encoding="utf-8")
    with serving(folder) as server:
        yield server


COMPARED = "/compare?run=a&run=a-run-of-another-name"
NARROW = 400
LEAST_PX = 11

_LEAST_FONT = """
Math.min(...[...document.querySelectorAll('body *')]
  .filter(each => each.getClientRects().length && [...each.childNodes].some(
    node => node.nodeType === 3 && node.textContent.trim()))
  .map(each => parseFloat(getComputedStyle(each).fontSize) * (each.getScreenCTM?.()?.a ?? 1)))
"""
_CUT = """
[...document.querySelectorAll('body *')].filter(each =>
  !each.closest('.wide, pre, .at, .thought, .action') && each.getClientRects().length
  && each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 90))
"""
_HINTED = """
[...document.querySelectorAll('.wide')].every(
  each => getComputedStyle(each).overflowX === 'auto'
  && getComputedStyle(each).backgroundImage.includes('gradient'))
"""


@pytest.mark.parametrize(
    "path",
    [
        *("/", COMPARED, "/compare"),
        *(f"/runs/a/{page}" for page in ("", "tasks", "tasks/mini/click", "groups")),
        *(f"/runs/a/{page}" for page in ("groups/g000001", "trajectories")),
        *(f"/runs/a/{page}" for page in ("trajectories/g000001-00", "evaluations")),
        "/runs/a/evaluations/two?against=one",
    ],
)
def test_at_400_pixels_every_text_is_legible_and_nothing_is_cut_without_a_hint(
    path: str, browser: Browser, runs: Server
) -> None:
    check_narrow(browser, runs, path)


def test_so_are_the_pages_of_an_exploration(browser: Browser, tmp_path: Path) -> None:
    explored(tmp_path, "Settings of the display, and more")
    with serving(tmp_path) as server:
        links = Bones.of(server.page("/")).links
        screen = next(link for link in links if link.startswith("/screens/"))
        for path in ("/", "/steps", "/merges", screen):
            check_narrow(browser, server, path)


def check_narrow(browser: Browser, server: Server, path: str) -> None:
    browser.resize(NARROW)
    try:
        browser.open(f"http://127.0.0.1:{server.port}{path}")
        assert browser.evaluate("innerWidth") == NARROW
        assert browser.evaluate("document.documentElement.scrollWidth") == NARROW
        assert browser.evaluate(_LEAST_FONT) >= LEAST_PX
        assert browser.evaluate(_CUT) == []
        assert browser.evaluate(_HINTED)
    finally:
        browser.resize(WIDTH)


@pytest.mark.parametrize("width", [WIDTH, NARROW])
def test_the_pointer_over_a_chart_shows_the_values_beside_it(
    width: int, browser: Browser, runs: Server
) -> None:
    browser.resize(width)
    try:
        browser.open(f"http://127.0.0.1:{runs.port}{COMPARED}")
        chart = "[...document.querySelectorAll('figure')].find(e => e.innerText.startsWith('loss'))"
        browser.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
        shown = (
            f"[...{chart}.querySelectorAll('.values')]"
            ".filter(e => getComputedStyle(e).visibility === 'visible')"
            ".map(e => [e.innerText, e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
        )
        browser.point(1, 1)
        assert browser.evaluate(shown) == []
        left, top, across, down = browser.evaluate(
            f"(r => [r.left, r.top, r.width, r.height])({chart}.querySelector('.area').getBoundingClientRect())"
        )
        for share, version in ((0.02, 1), (0.5, 2), (0.98, 3)):
            browser.point(left + share * across, top + down / 3)
            [[text, start, end]] = browser.evaluate(shown)
            lines = text.splitlines()
            assert lines[0] == f"policy version: {version}"
            value = f"{1 / version:.3g}"
            assert sorted(lines[1:]) == [f"a {value}", f"a-run-of-another-name {value}"]
            assert 0 <= start < end <= width
    finally:
        browser.resize(WIDTH)
