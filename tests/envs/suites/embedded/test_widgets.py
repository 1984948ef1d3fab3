"""Each widget: where it is hit, and how it handles mouse and keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.contract.actions import (
    Click,
    DoubleClick,
    Drag,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
)
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.controls import (
    Button,
    CheckBox,
    Key,
    ListRow,
    NavItem,
    ScrollBar,
    ScrollView,
    Slider,
    TextTab,
    Toggle,
    radios,
)
from envs.suites.embedded.draw import Rect, to_image
from envs.suites.embedded.marks import (
    ColourBox,
    ColourButton,
    ColourCombo,
    Glyph,
    IconButton,
    ShapeTab,
    Swatch,
    Wheel,
)
from envs.suites.embedded.menus import Combo, Entry, MenuTitle, context_menu, dialog
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.theme import THEMES
from envs.suites.embedded.widgets import (
    Fill,
    Free,
    Gap,
    Label,
    Panel,
    Sized,
    Ui,
    Widget,
    Window,
    column,
    row,
)

SCREEN = Rect(0, 0, 320, 240)


class Bench:
    """A screen of layers made by a function, and a record of what the widgets report."""

    def __init__(self, build: Callable[[Bench], list[Layer]]) -> None:
        self.notes: list[Any] = []
        self.values: dict[str, Any] = {}
        self.app = App(Ui(320, 240, THEMES[0]), lambda: build(self))

    def note(self, what: Any) -> Callable[[], None]:
        return lambda: self.notes.append(what)

    def put(self, key: str) -> Callable[[Any], None]:
        return lambda value: self.values.__setitem__(key, value)

    def click(self, name: str, button: str = "left") -> None:
        info = self.app.see(name)
        assert info is not None, f"{name} is out of reach"
        x, y = info.centre
        self.app.dispatch(Click(x=x, y=y, button=button))  # type: ignore[arg-type]

    def press(self, *keys: str) -> None:
        self.app.dispatch(KeyPress(keys=list(keys)))

    def type(self, text: str) -> None:
        self.app.dispatch(Type(text=text))


def bench(*widgets: Callable[[Bench], Widget]) -> Bench:
    """A bench with one column of widgets."""
    return Bench(lambda b: [Layer(column(*(make(b) for make in widgets), align="start"), SCREEN)])


# --- pressing ---------------------------------------------------------------------------------

PRESSABLE: dict[str, Callable[[Bench], Widget]] = {
    "Button": lambda b: Button("w", "Go", b.note("go")),
    "Key": lambda b: Key("w", "7", b.note("go")),
    "CheckBox": lambda b: CheckBox("w", "Tick", False, b.note("go")),
    "Toggle": lambda b: Toggle("w", "Switch", True, b.note("go")),
    "TextTab": lambda b: TextTab("w", "Tab", b.note("go"), active=True),
    "NavItem": lambda b: NavItem("w", "Page", b.note("go"), active=True),
    "ListRow": lambda b: ListRow(
        "w", "line", b.note("go"), note="note", icon="file", selected=True
    ),
    "IconButton": lambda b: Sized(IconButton("w", "trash", b.note("go")), 28, 28),
    "IconButton with text": lambda b: Sized(IconButton("w", "x", b.note("go"), text="OK"), 50, 28),
    "ColourButton": lambda b: Sized(ColourButton("w", "red", b.note("go")), 40, 30),
    "Swatch": lambda b: Sized(Swatch("w", "red", b.note("go")), 40, 30),
    "ColourBox": lambda b: Sized(ColourBox("w", "red", True, b.note("go")), 28, 28),
    "Glyph": lambda b: Sized(
        Glyph("w", "file", b.note("go"), ink=(0, 0, 0), colour="red", selected=True), 30, 30
    ),
    "ShapeTab": lambda b: Sized(ShapeTab("star", b.note("go"), active=False), 40, 30),
    "ColourCombo": lambda b: Sized(ColourCombo("w", (255, 0, 0), b.note("go")), 80, 30),
}


@pytest.mark.parametrize("kind", PRESSABLE)
def test_a_press_on_any_pixel_inside_reaches_it_and_none_outside_does(kind: str) -> None:
    b = bench(lambda _: Gap(10, 30), lambda b: row(Gap(40), PRESSABLE[kind](b)))
    name = "star.tab" if kind == "ShapeTab" else "w"
    info = b.app.see(name)
    assert info is not None
    x0, y0, x1, y1 = info.bbox
    for x, y in ((x0, y0), (x1 - 1, y0), (x0, y1 - 1), (x1 - 1, y1 - 1), info.centre):
        b.app.dispatch(Click(x=x, y=y))
    assert b.notes == ["go"] * 5
    for x, y in ((x0 - 1, y0), (x1, y0), (x0, y0 - 1), (x0, y1), (-5, -5), (999, 999)):
        b.app.dispatch(Click(x=x, y=y))
    assert b.notes == ["go"] * 5


@pytest.mark.parametrize("kind", PRESSABLE)
def test_enter_and_space_press_the_focused_widget_and_the_focus_is_visible(kind: str) -> None:
    b = bench(PRESSABLE[kind])
    bare = to_image(b.app.paint()).tobytes()
    b.press("tab")
    b.press("enter")
    b.press("space")
    b.type(" ")
    assert b.notes == ["go"] * 3
    if kind in (
        "Button",
        "Key",
        "CheckBox",
        "Toggle",
        "TextTab",
        "NavItem",
        "ListRow",
        "IconButton",
    ):
        assert to_image(b.app.paint()).tobytes() != bare


@pytest.mark.parametrize("kind", PRESSABLE)
def test_only_the_left_button_presses(kind: str) -> None:
    b = bench(PRESSABLE[kind])
    name = "star.tab" if kind == "ShapeTab" else "w"
    b.click(name, "right")
    b.click(name, "middle")
    assert b.notes == []


def test_a_disabled_button_does_nothing() -> None:
    b = bench(lambda b: Button("w", "Go", b.note("go"), enabled=False))
    b.click("w")
    b.press("enter")
    assert b.notes == []


def test_a_radio_reports_its_option() -> None:
    b = bench(lambda b: column(*radios("size", ("S", "M", "L"), "S", b.put("size"))))
    b.click("size.L")
    assert b.values == {"size": "L"}


def test_decoration_takes_no_press() -> None:
    b = bench(lambda _: Label("words"), lambda _: Sized(Fill((0, 0, 0)), 20, 20))
    before = to_image(b.app.paint()).tobytes()
    b.app.dispatch(Click(x=5, y=5))
    b.app.dispatch(DoubleClick(x=5, y=25))
    assert to_image(b.app.paint()).tobytes() == before
    assert b.app.widgets() == []


# --- focus ------------------------------------------------------------------------------------


def test_tab_goes_round_in_tree_order_and_shift_tab_back() -> None:
    b = bench(*(lambda b, n=n: Button(n, n, b.note(n)) for n in ("one", "two", "three")))  # type: ignore[misc]
    order = []
    for _ in range(4):
        b.press("tab")
        order.append(b.app.ui.focus)
    assert order == ["one", "two", "three", "one"]
    b.press("shift", "tab")
    assert b.app.ui.focus == "three"


def test_a_click_takes_the_focus_and_a_click_beside_drops_it() -> None:
    b = bench(lambda b: TextField("t", b.values.get("t", ""), b.put("t")))
    b.click("t")
    b.type("a")
    b.app.dispatch(Click(x=300, y=200))
    b.type("b")
    assert b.values == {"t": "a"}
    assert b.app.ui.focus == ""


# --- text -------------------------------------------------------------------------------------


def text_bench(start: str = "", **options: Any) -> Bench:
    b = bench(lambda b: TextField("t", b.values["t"] if b.values else start, b.put("t"), **options))
    b.click("t")
    b.press("end")
    return b


def test_typing_goes_in_at_the_caret() -> None:
    b = text_bench("word")
    b.press("home")
    b.type("a ")
    b.press("right")
    b.type("!")
    assert b.values["t"] == "a w!ord"


def test_backspace_and_delete_take_one_character_or_the_selection() -> None:
    b = text_bench("abcdef")
    b.press("backspace")
    b.press("home")
    b.press("delete")
    assert b.values["t"] == "bcde"
    b.press("shift", "right")
    b.press("shift", "right")
    b.press("backspace")
    assert b.values["t"] == "de"


def test_select_all_and_typing_replaces_everything() -> None:
    b = text_bench("old words")
    b.press("ctrl", "a")
    b.type("new")
    assert b.values["t"] == "new"


def test_a_double_click_selects_the_word() -> None:
    b = text_bench("red green blue")
    field = b.app.see("t")
    assert field is not None
    b.app.dispatch(DoubleClick(x=field.bbox.x0 + 8, y=field.centre[1]))
    b.type("pink")
    assert b.values["t"] == "pink green blue"


def test_a_drag_selects_what_it_passes() -> None:
    b = text_bench("wwwwww")
    field = b.app.see("t")
    assert field is not None
    y = field.centre[1]
    b.app.dispatch(Drag(path=[(field.bbox.x0 + 1, y), (field.bbox.x1 - 1, y)]))
    b.press("delete")
    assert b.values["t"] == ""


def edges(b: Bench) -> tuple[int, int, int]:
    """The left and right end of the field, and its middle line."""
    field = b.app.see("t")
    assert field is not None
    return field.bbox.x0 + 1, field.bbox.x1 - 1, field.centre[1]


def test_a_triple_click_selects_the_line() -> None:
    b = text_bench("red green blue")
    left, _, y = edges(b)
    b.app.dispatch(TripleClick(x=left, y=y))
    b.type("pink")
    assert b.values["t"] == "pink"


def test_a_click_with_shift_selects_up_to_it() -> None:
    b = text_bench("red green blue")
    left, _, y = edges(b)
    b.app.dispatch(Click(x=left, y=y, modifiers=("shift",)))
    b.type("pink")
    assert b.values["t"] == "pink"


def test_press_move_and_release_are_a_drag_and_without_a_move_a_click() -> None:
    b = text_bench("red green blue")
    left, right, y = edges(b)
    for action in (MouseDown(x=left, y=y), Move(x=left + 9, y=y), Move(x=right, y=y), MouseUp()):
        b.app.dispatch(action)
    b.type("pink")
    assert b.values["t"] == "pink"
    b = bench(lambda b: Button("w", "Go", b.note("go")))
    b.app.dispatch(MouseUp(x=10, y=10))
    b.app.dispatch(MouseDown(x=10, y=10))
    assert b.notes == []
    b.app.dispatch(MouseUp())
    assert b.notes == ["go"]


def test_a_drag_with_another_button_moves_nothing() -> None:
    b = text_bench("word")
    left, right, y = edges(b)
    b.app.dispatch(Drag(path=[(left, y), (right, y)], button="right"))
    b.press("delete")
    assert b.values["t"] == "word"


def test_keys_are_held_for_the_actions_that_follow() -> None:
    b = text_bench("word")
    b.app.dispatch(KeyDown(key="Ctrl"))
    b.press("a")
    b.app.dispatch(KeyUp(key="ctrl"))
    b.app.dispatch(KeyDown(key="shift"))
    b.type("x")
    b.app.dispatch(KeyUp(key="shift"))
    b.app.dispatch(KeyDown(key="y"))
    b.app.dispatch(KeyDown(key="y"))
    assert b.values["t"] == "Xy"
    b.app.dispatch(KeyDown(key="ctrl"))
    b.type("ax")  # all of it, cut
    assert b.values["t"] == ""


def test_cut_and_paste_carry_text_from_one_field_to_another() -> None:
    b = bench(
        lambda b: TextField("a", b.values.get("a", "cargo"), b.put("a")),
        lambda b: TextField("b", b.values.get("b", ""), b.put("b")),
    )
    b.click("a")
    b.press("ctrl", "a")
    b.press("ctrl", "x")
    b.press("tab")
    b.press("ctrl", "v")
    assert b.values == {"a": "", "b": "cargo"}


def test_tab_selects_the_next_field_whole_and_typed_tabs_and_line_ends_are_keys() -> None:
    b = bench(
        lambda b: TextField("a", b.values.get("a", "x"), b.put("a")),
        lambda b: TextField("b", b.values.get("b", "y"), b.put("b"), on_enter=b.note("sent")),
    )
    b.press("tab")
    b.type("one\ttwo\n")
    assert b.values == {"a": "one", "b": "two"}
    assert b.notes == ["sent"]


def test_a_secret_is_drawn_as_dots_and_not_copied() -> None:
    plain, secret = text_bench("abc"), text_bench("abc", secret=True)
    assert to_image(plain.app.paint()).tobytes() != to_image(secret.app.paint()).tobytes()
    secret.press("ctrl", "a")
    secret.press("ctrl", "c")
    assert secret.app.ui.clipboard == ""


def test_a_long_text_keeps_the_caret_in_sight() -> None:
    b = text_bench("", width=60)
    b.type("a very long text that does not fit")
    assert b.values["t"] == "a very long text that does not fit"
    field = b.app.find("t")
    assert isinstance(field, TextField)
    text, first = field._visible_text(b.app.ui)
    assert first > 0
    assert b.values["t"].endswith(text)


KEYS = ("left", "right", "home", "end", "backspace", "delete", "all", "grow", "shrink")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(KEYS), st.text("ab cd", min_size=1, max_size=3))))
def test_editing_agrees_with_a_plain_string_model(edits: list[str]) -> None:
    b = text_bench("start")
    text, caret, anchor = "start", 5, 5
    for edit in edits:
        low, high = min(caret, anchor), max(caret, anchor)
        match edit:
            case "left":
                b.press("left")
                caret = anchor = low if low != high else max(0, caret - 1)
            case "right":
                b.press("right")
                caret = anchor = high if low != high else min(len(text), caret + 1)
            case "home" | "end":
                b.press(edit)
                caret = anchor = 0 if edit == "home" else len(text)
            case "backspace" | "delete":
                b.press(edit)
                if low == high:
                    low, high = (low - 1, high) if edit == "backspace" else (low, high + 1)
                    low = max(0, low)
                text, caret = text[:low] + text[high:], low
                anchor = caret
            case "all":
                b.press("ctrl", "a")
                caret, anchor = len(text), 0
            case "grow" | "shrink":
                b.press("shift", "right" if edit == "grow" else "left")
                caret = min(max(0, caret + (1 if edit == "grow" else -1)), len(text))
            case _:
                b.type(edit)
                text = text[:low] + edit + text[high:]
                caret = anchor = low + len(edit)
    assert b.values.get("t", "start") == text
    assert (b.app.ui.caret, b.app.ui.anchor) == (caret, anchor)


# --- drop-downs and menus ---------------------------------------------------------------------


def combo_bench(count: int = 4) -> Bench:
    options = [f"option {i}" for i in range(count)]
    return bench(
        lambda b: Combo("c", b.values.get("c", options[0]), options, b.put("c")),
        lambda b: Button("below", "Below", b.note("below")),
    )


def test_a_drop_down_opens_chooses_and_closes() -> None:
    b = combo_bench()
    assert b.app.see("c.option 2") is None
    b.click("c")
    b.click("c.option 2")
    assert b.values == {"c": "option 2"}
    assert b.app.see("c.option 2") is None


def test_widgets_under_an_open_drop_down_cannot_be_pressed_and_a_press_outside_only_closes_it() -> (
    None
):
    b = combo_bench()
    b.click("c")
    assert b.app.see("below") is None
    b.app.dispatch(Click(x=300, y=200))
    assert b.notes == []
    assert b.values == {}
    b.click("below")
    assert b.notes == ["below"]


def test_a_drop_down_answers_to_arrows_and_escape() -> None:
    b = combo_bench()
    b.press("tab")
    b.press("down")
    b.press("down")
    b.press("up")
    assert b.values == {"c": "option 1"}
    b.press("space")
    assert b.app.see("c.option 3") is not None
    b.press("escape")
    assert b.app.see("c.option 3") is None


def test_a_long_drop_down_scrolls_to_every_option() -> None:
    b = combo_bench(20)
    b.click("c")
    assert b.app.see("c.option 19") is None
    first = b.app.see("c.option 0")
    assert first is not None
    b.app.dispatch(Scroll(x=first.centre[0], y=first.centre[1], dy=10))
    b.click("c.option 19")
    assert b.values == {"c": "option 19"}


def menu_bench() -> Bench:
    return bench(
        lambda b: row(
            MenuTitle("File", "File", [Entry("File.a", "A", b.note("a")), Entry("File.b", "B", b.note("b"), False)]),
            MenuTitle("Edit", "Edit", [Entry("Edit.c", "C", b.note("c"))]),
            gap=0,
        )
    )  # fmt: skip


def test_a_menu_opens_and_its_entry_acts_and_closes_it() -> None:
    b = menu_bench()
    b.click("File")
    b.click("File.a")
    assert b.notes == ["a"]
    assert b.app.see("File.a") is None


def test_a_disabled_entry_does_nothing_and_escape_closes() -> None:
    b = menu_bench()
    b.click("File")
    b.click("File.b")
    assert b.notes == []
    b.press("escape")
    b.click("Edit")
    b.press("escape")
    assert b.app.see("Edit.c") is None


def test_a_context_menu_stays_on_the_screen_wherever_it_opens() -> None:
    for at in ((0, 0), (319, 239), (160, 239)):
        b = Bench(lambda b, at=at: [  # type: ignore[misc]
            Layer(Gap(), SCREEN),
            context_menu(b.app.ui if hasattr(b, "app") else Ui(320, 240, THEMES[0]),
                         [Entry("x", "Do it", b.note("x"))], at, b.note("closed")),
        ])  # fmt: skip
        assert b.app.layers[-1].box.cut(SCREEN) == b.app.layers[-1].box
        b.click("x")
        assert b.notes == ["closed", "x"]


# --- dialogs ----------------------------------------------------------------------------------


def dialog_bench() -> Bench:
    def build(b: Bench) -> list[Layer]:
        ui = b.app.ui if hasattr(b, "app") else Ui(320, 240, THEMES[0])
        base = Layer(column(Button("behind", "Behind", b.note("behind"))), SCREEN)
        buttons = [("no", "No", b.note("no")), ("yes", "Yes", b.note("yes"))]
        text = Label("Really?")
        close = b.note("close")
        return [base, dialog(ui, "ask", "Ask", text, buttons, on_close=close, over=SCREEN)]

    return Bench(build)


def test_nothing_behind_a_modal_dialog_can_be_reached() -> None:
    b = dialog_bench()
    assert b.app.see("behind") is None
    assert {info.name for info in b.app.widgets()} == {"ask.no", "ask.yes", "ask.close"}
    b.app.dispatch(Click(x=10, y=10))
    b.press("tab")
    assert b.app.ui.focus != "behind"
    assert b.notes == []


def test_a_dialog_answers_to_its_buttons_its_cross_enter_and_escape() -> None:
    b = dialog_bench()
    for name in ("ask.no", "ask.yes", "ask.close"):
        b.click(name)
    b.app.ui.focus = ""
    b.press("enter")
    b.press("escape")
    assert b.notes == ["no", "yes", "close", "yes", "close"]


# --- sliders and scrolling --------------------------------------------------------------------


def test_a_slider_takes_every_value_by_a_press_on_its_place() -> None:
    b = bench(lambda b: Slider("s", b.values.get("s", 50), b.put("s")))
    for value in range(0, 101, 10):
        slider = b.app.find("s")
        assert isinstance(slider, Slider)
        b.app.dispatch(Click(x=slider.x_of(b.app.ui, value), y=slider.bbox.centre[1]))
        assert b.values["s"] == value


def test_a_slider_follows_a_drag_and_the_arrows_and_stays_in_its_range() -> None:
    b = bench(lambda b: Slider("s", b.values.get("s", 50), b.put("s")))
    slider = b.app.find("s")
    assert isinstance(slider, Slider)
    y = slider.bbox.centre[1]
    b.app.dispatch(Drag(path=[(slider.x_of(b.app.ui, 50), y), (5000, y)]))
    assert b.values["s"] == 100
    b.press("tab")
    b.press("right")
    b.press("left")
    assert b.values["s"] == 90
    b.press("home")
    b.press("left")
    assert b.values["s"] == 0


def scroll_bench(count: int = 30) -> Bench:
    def build(b: Bench) -> list[Layer]:
        rows = [ListRow(f"r{i}", f"row {i}", b.note(i)) for i in range(count)]
        view = ScrollView("v", column(*rows, gap=0))
        return [Layer(Free([(view, Rect(20, 20, 200, 140))]), SCREEN)]

    return Bench(build)


def test_rows_outside_of_the_view_cannot_be_reached() -> None:
    b = scroll_bench()
    assert b.app.see("r0") is not None
    assert b.app.see("r20") is None
    b.app.dispatch(Click(x=50, y=200))
    assert b.notes == []


def test_the_wheel_reaches_the_last_row_and_comes_back() -> None:
    b = scroll_bench()
    for _ in range(20):
        b.app.dispatch(Scroll(x=50, y=50, dy=1))
    b.click("r29")
    b.app.dispatch(Scroll(x=50, y=50, dy=-50))
    b.click("r0")
    assert b.notes == [29, 0]


def test_the_wheel_elsewhere_moves_nothing() -> None:
    b = scroll_bench()
    b.app.dispatch(Scroll(x=300, y=200, dy=3))
    b.app.dispatch(Scroll(x=50, y=50, dx=3))
    assert b.app.ui.offsets.get("v", 0) == 0


def test_the_scroll_bar_pages_on_a_press_and_follows_a_drag() -> None:
    b = scroll_bench()
    bar = b.app.see("v.bar")
    assert bar is not None
    b.app.dispatch(Click(x=bar.centre[0], y=bar.bbox.y1 - 2))
    assert 80 <= b.app.ui.offsets["v"] <= 120
    widget = b.app.find("v.bar")
    assert isinstance(widget, ScrollBar)
    x, y = widget.thumb(b.app.ui).centre
    b.app.dispatch(Drag(path=[(x, y), (x, 239)]))
    b.click("r29")
    assert b.notes == [29]


def test_a_list_that_fits_has_no_bar() -> None:
    b = scroll_bench(3)
    assert b.app.see("v.bar") is None
    b.app.dispatch(Scroll(x=50, y=50, dy=1))
    b.click("r0")
    assert b.notes == [0]


def test_a_wheel_area_reports_the_notches() -> None:
    b = bench(lambda b: Sized(Wheel(Fill((0, 0, 0)), b.notes.append), 50, 50))
    b.app.dispatch(Scroll(x=10, y=10, dy=-2))
    assert b.notes == [-2]


def test_a_row_is_opened_by_a_double_click_or_enter_and_asked_by_a_right_click() -> None:
    b = bench(
        lambda b: ListRow(
            "r", "row", b.note("select"), on_open=b.note("open"),
            on_menu=lambda x, y: b.notes.append("menu"),
        )
    )  # fmt: skip
    info = b.app.see("r")
    assert info is not None
    x, y = info.centre
    b.app.dispatch(DoubleClick(x=x, y=y))
    b.press("enter")
    b.click("r", "right")
    assert b.notes == ["select", "open", "open", "select", "menu"]


def test_a_row_dragged_onto_another_is_dropped_there() -> None:
    b = bench(
        lambda b: ListRow("from", "from", b.note("select")),
        lambda b: ListRow("onto", "onto", b.note("select"), on_drop=b.notes.append),
    )
    start, end = b.app.see("from"), b.app.see("onto")
    assert start is not None
    assert end is not None
    b.app.dispatch(Drag(path=[start.centre, end.centre]))
    assert b.notes == ["from"]


# --- layout -----------------------------------------------------------------------------------


def test_growing_children_share_the_remaining_room() -> None:
    left, right = Gap(10, 10), Gap(10, 10)
    b = Bench(
        lambda _: [
            Layer(
                row(left, Button("b", "x", lambda: None), right, gap=0, grow=[left, right]), SCREEN
            )
        ]
    )
    button = b.app.find("b")
    assert button is not None
    assert abs(button.bbox.centre[0] - SCREEN.centre[0]) <= 1


def test_a_window_keeps_its_body_inside_its_frame() -> None:
    body = Panel(Label("x"), fill=(0, 0, 0))
    b = Bench(
        lambda b: [Layer(Window(body, title="T", on_close=b.note("closed")), Rect(10, 10, 100, 90))]
    )
    assert body.bbox.cut(Rect(10, 10, 100, 90)) == body.bbox
    b.click("window.close")
    assert b.notes == ["closed"]
