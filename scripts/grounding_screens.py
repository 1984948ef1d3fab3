"""Screens of suite `mini` with single-step questions, to train a base model that only grounds.

Questions are about scenes in random states: "click the red button", "click next".
Nothing shows which order of clicks reaches a goal; reinforcement learning has to find that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from PIL import Image

from envs.contract.base import Observation
from envs.contract.screenshots import MEDIA_TYPES
from envs.suites.embedded.app import App
from envs.suites.embedded.draw import Canvas, Rect, encode, to_image
from envs.suites.embedded.scene import COLOUR_PHRASES, ICON_PHRASES, TAB_PHRASE, phrases
from envs.suites.embedded.suites import MiniSuite
from envs.suites.embedded.tasks import mini, mini_scenes
from envs.suites.embedded.theme import COLOURS, THEMES
from envs.suites.embedded.widgets import Ui

INSTRUCTIONS: tuple[str, ...] = (
    *(p.format(colour) for forms in COLOUR_PHRASES.values() for p in forms for colour in COLOURS),
    *(TAB_PHRASE.format(shape) for shape in mini.SHAPES),
    *ICON_PHRASES.values(),
)
"""Every instruction that suite mini and its grounding questions use."""

VOCABULARY: tuple[str, ...] = tuple(
    sorted({word for text in INSTRUCTIONS for word in text.split()})
)
"""Every word of them."""

_SCENES: dict[str, Callable[..., mini.MiniScene]] = {
    "buttons": mini.ClickScene,
    "menus": mini_scenes.MenuScene,
    "pages": mini_scenes.PageScene,
    "tabs": mini_scenes.TabsScene,
    "rows": mini_scenes.ScrollScene,
    "folders": mini_scenes.FolderScene,
    "boxes": mini_scenes.FormScene,
    "choices": mini_scenes.DropdownScene,
    "files": mini_scenes.DeleteScene,
}
_WEIGHTS = (2, 3, 3, 2, 2, 2, 3, 5, 2)  # so that no instruction is much rarer than the others
_POPUP_SHARE = 0.12  # of the screens have a pop-up on top
_CONFIRM_SHARE = 0.2  # of the plain button screens ask for a confirmation


@dataclass(frozen=True)
class GroundingScreen:
    """One screen and what may be asked about it."""

    canvas: Canvas
    questions: list[tuple[str, Rect]]  # instruction, and where a click answers it
    absent: list[str]  # of INSTRUCTIONS: those whose widget is nowhere on the screen
    kind: str  # what is on top: dialog, menu, list, or else the kind of window
    colours: list[str]  # of the widgets that can be reached
    idle: list[str]  # instructions of this scene that no click answers: absent or covered
    satisfied: list[
        tuple[str, Rect]
    ]  # instructions whose widget is already in the wanted state, and where it is
    sights: list[Rect]  # every widget whose middle can be seen, reachable or dimmed by a dialog
    app: App  # what is shown

    @property
    def image(self) -> Image.Image:
        """The screen, mode RGB."""
        return to_image(self.canvas)

    @property
    def observation(self) -> Observation:
        """The screen as an environment observes it."""
        width, height = self.canvas.image.size
        return Observation(encode(self.canvas), MEDIA_TYPES["png"], width, height)


def grounding_screen(seed: int, size: tuple[int, int] = (168, 168)) -> GroundingScreen:
    """Return a random screen with every question that has exactly one answer on it."""
    rng = Random(f"grounding/{seed}")
    scale = min(size) / min(MiniSuite.size)
    ui = Ui(*size, rng.choice(THEMES), scale)
    name = rng.choices(list(_SCENES), _WEIGHTS)[0]
    popup = rng.random() < _POPUP_SHARE
    confirm = name == "buttons" and rng.random() < _CONFIRM_SHARE
    scene = _SCENES[name](rng, ui, popup=popup, confirm=confirm)
    scene.wander(rng)
    app = App(ui, scene.layers)
    reachable = app.widgets()
    boxes_by_phrase: dict[str, list[Rect]] = {}
    for widget in reachable:
        for phrase in phrases(widget.role, widget.name, widget.colour):
            boxes_by_phrase.setdefault(phrase, []).append(widget.bbox)
    anywhere = {
        phrase
        for layer in app.layers
        for widget in layer.root.walk()
        for phrase in phrases(widget.role, widget.name, widget.colour)
    }
    return GroundingScreen(
        canvas=app.paint(),
        questions=[
            (phrase, boxes[0])
            for phrase, boxes in boxes_by_phrase.items()
            if len(boxes) == 1 and phrase not in _satisfied(scene)
        ],
        absent=[phrase for phrase in INSTRUCTIONS if phrase not in anywhere],
        kind=_on_top(scene, name),
        colours=sorted({widget.colour for widget in reachable if widget.colour}),
        idle=[
            phrase
            for phrase in (scene.phrase.format(colour=colour) for colour in COLOURS)
            if phrase not in boxes_by_phrase
        ],
        satisfied=[
            (phrase, boxes_by_phrase[phrase][0])
            for phrase in sorted(_satisfied(scene) & boxes_by_phrase.keys())
        ],
        sights=_sights(app),
        app=app,
    )


KINDS: tuple[str, ...] = ("dialog", "menu", "list", *_SCENES)
"""Every value of `GroundingScreen.kind`."""


def _satisfied(scene: mini.MiniScene) -> set[str]:
    """Return the instructions whose widget is already in the wanted state."""
    if isinstance(scene, mini_scenes.FormScene):
        return {scene.phrase.format(colour=colour) for colour in scene.ticked}
    if isinstance(scene, mini_scenes.DeleteScene) and scene.selected is not None:
        return {scene.phrase.format(colour=scene.selected)}
    return set()


def _sights(app: App) -> list[Rect]:
    """Return every widget with a role whose middle no higher layer covers."""
    return [
        widget.visible
        for depth, layer in enumerate(app.layers)
        for widget in layer.root.walk()
        if widget.role
        and widget.clickable
        and widget.visible.width > 0
        and widget.visible.height > 0
        and not any(above.box.contains(*widget.visible.centre) for above in app.layers[depth + 1 :])
    ]


def _on_top(scene: mini.MiniScene, name: str) -> str:
    if scene.popup_open or scene.pending is not None:
        return "dialog"
    if scene.overlay() is not None:
        return "menu" if isinstance(scene, mini_scenes.MenuScene) else "list"
    return name
