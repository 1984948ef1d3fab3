"""What an explorer is told of a desktop: menus and dialogs shut out the rest; LibreOffice is put right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from envs.contract.elements import Element, elements_of, make_explorable, performing, state_of
from envs.suites.desktop.accessibility import has_accessibility
from envs.tools.atspi_tree import in_place, nodes_of, route_of

STATES = ("active", "checked", "editable", "expanded", "focused", "modal", "selected")


def widget(depth: int, role: str, name: str = "", box: Any = None, **states: Any) -> dict[str, Any]:
    names = {
        **dict.fromkeys(STATES, False),
        "sensitive": True,
        "showing": box is not None,
        "text": "",
        **states,
    }
    return {"depth": depth, "role": role, "name": name, "box": box, **names}


def window(*inside: dict[str, Any], application: str = "notes") -> list[dict[str, Any]]:
    return [
        widget(0, "desktop frame", "main", [0, 0, 400, 300]),
        widget(1, "application", application),
        widget(2, "frame", "note.txt", [0, 0, 400, 300], active=True),
        widget(3, "menu bar", "", [0, 20, 400, 20]),
        widget(4, "menu", "File", [0, 20, 40, 20]),
        *inside,
        widget(3, "text", "", [0, 40, 400, 260], editable=True),
        widget(3, "push button", "Save", [350, 270, 100, 20]),
        widget(3, "push button", "Undo", [10, 270, 40, 20], sensitive=False),
    ]


def elements_of_widgets(widgets: list[dict[str, Any]]) -> list[Element]:
    return elements_of(nodes_of(widgets, 400, 300))


def test_what_reaches_beyond_the_screen_is_cut_and_what_is_disabled_left_out() -> None:
    elements = {each.name or each.role: each for each in elements_of_widgets(window())}
    assert set(elements) == {"File", "text", "Save"}
    assert elements["Save"].box == (350, 270, 400, 290)
    assert elements["text"].actions == ("click", "type")


def test_an_open_menu_shuts_out_all_but_menus() -> None:
    closed = [widget(5, "menu item", name) for name in ("Open", "Quit")]
    opened = [
        widget(5, "menu item", name, [0, top, 90, 20]) for name, top in (("Open", 40), ("Quit", 60))
    ]
    assert [each.name for each in elements_of_widgets(window(*opened))] == ["File", "Open", "Quit"]
    assert elements_of_widgets(window(*closed)) == elements_of_widgets(window())


def test_a_modal_dialog_shuts_out_its_application_and_names_the_route() -> None:
    dialog = [
        widget(2, "dialog", "Save As", [100, 100, 200, 100], modal=True),
        widget(3, "push button", "Cancel", [120, 170, 60, 20]),
    ]
    assert [each.name for each in elements_of_widgets([*window(), *dialog])] == ["Cancel"]
    assert route_of([*window(), *dialog]) == "notes > notes: Save As"


def test_a_file_name_in_a_title_is_no_other_state() -> None:
    one, other = window(), window()
    other[2] = {**other[2], "name": "letter.txt"}
    states = {
        state_of(route_of(each), nodes_of(each, 400, 300)).id
        for each in (one, other, window(application="calc"))
    }
    assert len(states) == 2


def test_a_cell_is_called_what_is_in_it_and_takes_the_click() -> None:
    cells = [
        widget(3, "table", "", [0, 40, 300, 40]),
        widget(4, "table cell", "", [0, 40, 300, 20]),
        widget(5, "table cell", "list.txt", [20, 40, 280, 20]),
    ]
    elements = [
        each for each in elements_of_widgets([*window(), *cells]) if each.role == "table cell"
    ]
    assert [(each.name, each.actions) for each in elements] == [
        ("list.txt", ("click", "double_click"))
    ]


def test_the_contents_of_a_libreoffice_window_are_put_below_its_menu_bar() -> None:
    reported = [
        widget(0, "panel", "", [0, 46, 1280, 674]),
        widget(1, "root pane", "", [0, 21, 1280, 674]),
        widget(2, "tool bar", "Formatting", [0, 60, 1280, 39]),
        widget(3, "push button", "Bold", [328, 62, 33, 35]),
        widget(3, "combo box", "Font", [4, 87, 207, 34]),
        widget(4, "text", "", [4, 87, 171, 34]),
        widget(3, "push button", "Italic", [361, 62, 33, 35]),
        widget(1, "push button", "Close", [1256, 25, 16, 16]),
    ]
    assert [each["box"][1] for each in in_place(reported)] == [46, 46, 85, 87, 87, 87, 87, 25]


@pytest.mark.skipif(not has_accessibility(), reason="apt install at-spi2-core gir1.2-atspi-2.0")
@pytest.mark.skipif(not shutil.which("mousepad"), reason="apt install mousepad")
def test_a_real_application_opens_the_menu_that_an_element_names(tmp_path: Path) -> None:
    env, explorable = make_explorable("desktop")
    try:
        env.reset(seed=1, options={"task": "desktop/mousepad-append-line"})
        before, elements = explorable.state(), explorable.elements()
        assert (before, elements) == (explorable.state(), explorable.elements())
        for element in elements:
            left, top, right, bottom = element.box
            x, y = element.centre
            assert 0 <= left <= x < right <= 1280
            assert 0 <= top <= y < bottom <= 720
        menu = next(each for each in elements if (each.role, each.name) == ("menu", "View"))
        env.step(performing(menu, "click")[0])
        opened = {each.name for each in explorable.elements()}
        assert "Line Numbers" in opened
        assert explorable.state().id != before.id
    finally:
        env.close()
