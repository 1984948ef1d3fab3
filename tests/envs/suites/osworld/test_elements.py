"""What an explorer is told of OSWorld's guests: the guest server's accessibility tree."""

from __future__ import annotations

from envs.contract.base import Observation
from envs.suites.osworld.accessibility import widgets_of
from envs.tools.atspi_tree import elements_from, state_from

SCREEN = Observation(b"", "image/png", 1920, 1080)
NAMES = (
    'xmlns:st="https://accessibility.ubuntu.example.org/ns/state" '
    'xmlns:cp="https://accessibility.ubuntu.example.org/ns/component"'
)


def widget(tag: str, name: str, at: str, size: str, inside: str = "", states: str = "") -> str:
    marks = " ".join(f'st:{each}="true"' for each in ("showing", "enabled", *states.split()))
    place = f'cp:screencoord="({at})" cp:size="({size})"'
    return f'<{tag} name="{name}" {marks} {place}>{inside}</{tag}>'


def tree(title: str, *, dialog: str = "") -> str:
    save = widget("push-button", "Save", "700, 30", "60, 20")
    text = widget("text", "", "-10, 60", "800, 400", states="editable")
    window = widget("frame", title, "0, 27", "800, 500", save + text, states="active")
    return f'<desktop-frame {NAMES}><application name="gedit">{window}{dialog}</application></desktop-frame>'


def test_widgets_of_the_guest_are_elements_on_its_screen() -> None:
    elements = {e.name or e.role: e for e in elements_from(widgets_of(tree("notes.txt")), SCREEN)}
    assert elements["Save"].box == (700, 30, 760, 50)
    assert elements["text"].box == (0, 60, 790, 460)
    assert elements["text"].actions == ("click", "type")


def test_a_title_is_no_other_state_and_a_dialog_is() -> None:
    asks = widget(
        "dialog",
        "Save As",
        "100, 100",
        "300, 200",
        widget("push-button", "Cancel", "120, 250", "60, 20"),
        states="modal",
    )
    notes, other, dialog = (
        state_from(widgets_of(each), SCREEN)
        for each in (tree("notes.txt"), tree("letter.txt"), tree("notes.txt", dialog=asks))
    )
    assert notes.id == other.id != dialog.id
    assert dialog.route == "gedit > gedit: Save As"
    elements = elements_from(widgets_of(tree("notes.txt", dialog=asks)), SCREEN)
    assert [each.name for each in elements] == ["Cancel"]
