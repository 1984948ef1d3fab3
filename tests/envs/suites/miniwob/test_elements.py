"""What an explorer is told of a page is what a click there reaches. The real browser plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bus.errors import MissingPartError
from envs.contract.elements import Element, Explorable, performing
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages

try:
    find_chromium()
    find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PAGES = ("email-inbox", "social-media", "phone-book", "click-tab-2", "choose-list", "order-food")

REACHED = """((x, y) => {
  const hit = document.elementFromPoint(x, y);
  const words = (text) => text.replace(/\\s+/g, ' ').trim();
  const texts = [];
  for (let at = hit; at; at = at.parentElement) texts.push(words(at.innerText ?? at.textContent));
  return texts;
})"""


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    instance = MiniwobSuite().make_env(scale=1.5)
    yield instance
    instance.close()


def begin(env: MiniwobEnv, page: str, seed: int = 3) -> None:
    env.reset(seed=seed, options={"task": f"miniwob/{page}"})


def press(env: MiniwobEnv, element: Element) -> None:
    for action in performing(element, "click"):
        env.step(action)


def element_named(env: MiniwobEnv, name: str) -> Element:
    return next(each for each in env.elements() if each.name == name)


def test_every_element_is_on_the_screen_and_a_click_in_its_middle_reaches_it(
    env: MiniwobEnv,
) -> None:
    for page in PAGES:
        begin(env, page)
        elements = env.elements()
        assert elements
        assert len({each.place for each in elements}) == len(elements)
        for element in elements:
            left, top, right, bottom = element.box
            x, y = element.centre
            assert 0 <= left <= x < right <= 240
            assert 0 <= top <= y < bottom <= 315
            if element.role in ("link", "button"):
                assert element.name in env.ask(f"{REACHED}({x / 1.5}, {y / 1.5})")


def test_a_seed_and_a_typed_text_change_no_state(env: MiniwobEnv) -> None:
    assert isinstance(env, Explorable)
    for page in ("phone-book", "login-user"):
        states = set()
        for seed in range(4):
            begin(env, page, seed)
            assert (env.state(), env.elements()) == (env.state(), env.elements())
            states.add(env.state().id)
        assert len(states) == 1
    before = env.state()
    field = element_named(env, "Username")
    assert field.actions == ("click", "type")
    for action in performing(field, "type", "somebody"):
        env.step(action)
    assert env.ask("document.querySelector('#username').value") == "somebody"
    assert env.state() == before


def test_pages_and_dialogs_within_a_document_are_states_of_their_own(env: MiniwobEnv) -> None:
    begin(env, "email-inbox")
    inbox = env.state()
    rows = [each for each in env.elements() if each.role == "area"]
    icons = {each.name for each in env.elements() if each.role == "icon"}
    assert {"search", "star", "delete"} <= icons
    press(env, rows[0])
    mail = env.state()
    assert "Reply" in {each.name for each in env.elements()}
    press(env, element_named(env, "Reply"))
    reply = env.state()
    assert len({inbox.id, mail.id, reply.id}) == 3
    press(env, element_named(env, "left arrow"))
    press(env, element_named(env, "left arrow white"))
    assert env.state() == inbox


def test_a_field_is_called_what_stands_beside_it(env: MiniwobEnv) -> None:
    begin(env, "multi-layouts")
    fields = {each.name for each in env.elements() if each.role == "field"}
    assert fields == {"Genre", "Year", "Director"}
    begin(env, "enter-date")
    assert [each.name for each in env.elements()] == ["", "Submit"], "a button is no label"
    begin(env, "book-flight")
    assert {"From:", "To:"} <= {each.name for each in env.elements()}


def test_a_covered_or_hidden_part_is_no_element(env: MiniwobEnv) -> None:
    begin(env, "social-media")
    names = [each.name for each in env.elements()]
    assert "more" in names
    assert "Embed Tweet" not in names
    press(env, element_named(env, "more"))
    opened = {each.name for each in env.elements() if each.role == "list item"}
    assert {"Share via DM", "Embed Tweet"} <= opened
    begin(env, "choose-list")
    assert not [each for each in env.elements() if each.role == "option"]
    press(env, next(each for each in env.elements() if each.role == "combo"))
    options = [each for each in env.elements() if each.role == "option"]
    assert len(options) >= 2
    assert "Submit" not in {each.name for each in env.elements()}, "the list covers it"
    press(env, options[-1])
    assert env.ask("document.querySelector('#options').value") == options[-1].name
