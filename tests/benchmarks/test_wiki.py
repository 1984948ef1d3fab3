"""TiddlyWiki's instances: the same for a seed, others for another; played where Chromium and node are installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.learning import wiki_pages
from benchmarks.learning.wiki_pages import PACKAGE, VERSION, instance, notes_of
from bus.errors import DartError, UserError
from envs.contract.actions import Click
from envs.contract.elements import Explorable
from envs.contract.registry import make_env
from envs.tools.chromium import find_chromium

SUITE = "benchmarks.learning.wiki:WikiSuite"


def test_a_seed_draws_its_own_notes_and_always_the_same() -> None:
    assert notes_of(3) == notes_of(3)
    titles = {seed: {each["title"] for each in notes_of(seed)} for seed in (3, 4)}
    assert titles[3] != titles[4]
    shown = next(each["text"] for each in notes_of(3) if each["title"] == "$:/DefaultTiddlers")
    assert {each.strip("[]") for each in shown.split("]] [[")} <= titles[3]


def test_an_instance_is_the_page_with_a_second_store(tmp_path: Path) -> None:
    page = tmp_path / f"{PACKAGE}-{VERSION}.html"
    store = '<script class="tiddlywiki-tiddler-store" type="application/json">'
    page.write_text(f"<head></head>{store}[]</script><p>")
    made = (tmp_path / f"{instance(tmp_path, 5)}.html").read_text()
    first, own = made.split(store)[1:]
    assert first == "[]</script>"
    assert json.loads(own.partition("</script>")[0]) == notes_of(5)
    assert made.index("WOB_DONE_GLOBAL") < made.index("</head>")
    page.write_text("<head></head>")
    with pytest.raises(UserError, match="no store of notes"):
        instance(tmp_path, 6)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_chromium("")
    except DartError as error:
        pytest.skip(str(error))
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("apt install nodejs npm")
    cache = tmp_path_factory.mktemp("wiki")
    try:
        wiki_pages.fetched(cache)
    except UserError as error:  # npm tells it in its own words
        pytest.skip(f"npm registry not reached: {error}")
    return cache


def test_a_notebook_can_be_explored_and_begins_anew(pages: Path) -> None:
    env = make_env(SUITE, pages=str(pages))
    try:
        assert isinstance(env, Explorable)
        first, _ = env.reset(seed=1, options={"task": "wiki/look", "free": True})
        start = env.state().id
        more = next(each for each in env.elements() if each.name == "More")
        x, y = more.centre
        env.step(Click(x=x, y=y))
        assert env.state().id != start
        assert env.evaluate().outcome == "fail"
        again, _ = env.reset(seed=1, options={"task": "wiki/look", "free": True})
        assert (env.state().id, again.screenshot) == (start, first.screenshot)
        other, _ = env.reset(seed=2, options={"task": "wiki/look", "free": True})
        assert other.screenshot != first.screenshot
    finally:
        env.close()
