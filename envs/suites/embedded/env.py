"""EmbeddedEnv: scenes behind the GuiEnv contract, and the layers of a screen as nodes for an explorer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

from bus.errors import EnvError, TaskError
from envs.contract.actions import Action, Answer, Click, Done, Fail
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.elements import Box, Element, Node, Operation, ScreenState, elements_of, state_of
from envs.contract.options import ImageEncoding
from envs.contract.screenshots import MEDIA_TYPES
from envs.suites.embedded.app import App, WidgetInfo
from envs.suites.embedded.controls import ListRow, ScrollView
from envs.suites.embedded.draw import Rect, encode
from envs.suites.embedded.scene import Scene, SceneFactory, phrases
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.theme import THEMES, Theme
from envs.suites.embedded.widgets import Label, Ui, Widget, Window

MAX_SIDE = 4096  # pixels
SOLVE_LIMIT = 100  # steps after which a task counts as unsolvable


class EmbeddedEnv:
    """Plays the scenes of one suite at one size. See envs.contract.base.GuiEnv for the contract.

    The info of `reset` has `instruction`, `need` (steps of a shortest solution) and `max_steps` (steps after
    which this instance is truncated); the info of the last step has `verdict`.
    """

    def __init__(
        self,
        suite: str,
        tasks: Mapping[str, Task],
        scenes: Mapping[str, SceneFactory],
        *,
        size: tuple[int, int],
        design: tuple[int, int],
        max_scale: float,
        encoding: ImageEncoding = "png",
        slack: int = 2,
        themes: tuple[Theme, ...] = THEMES,
    ) -> None:
        """Make an environment; `design` is the smallest size for which the scenes are laid out, at scale 1.

        An instance allows `slack` steps beyond `need`. Raises TaskError for an invalid size, encoding or
        slack.
        """
        width, height = size
        if not (32 <= width <= MAX_SIDE and 32 <= height <= MAX_SIDE):
            raise TaskError(f"size must be 32 to {MAX_SIDE} pixels a side, got {width}x{height}")
        if isinstance(slack, bool) or not isinstance(slack, int) or slack < 0:
            raise TaskError(f"slack must be a whole number of at least 0, got {slack!r}")
        if encoding not in MEDIA_TYPES:
            raise TaskError(f"encoding must be 'png' or 'jpeg', got {encoding!r}")
        self._suite = suite
        self._tasks = tasks
        self._scenes = scenes
        self._size = size
        self._scale = min(width / design[0], height / design[1], max_scale)
        self._encoding: ImageEncoding = encoding
        self._slack = slack
        self._themes = themes
        self._fresh_seeds = Random()  # noqa: S311 - a seed, not a secret
        self._scene: Scene | None = None
        self._app: App | None = None
        self._last: tuple[bytes, Observation] | None = None
        self._steps = 0
        self._max_steps = 0
        self._free = False  # neither the goal nor a limit ends the episode
        self._has_ended = True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id, from `seed` (default: any)."""
        task = task_of(options, self._tasks, self._suite)
        seed = self._fresh_seeds.randrange(2**31) if seed is None else seed
        need = self._need(task, seed)
        self._scene, self._app = self._start(task, seed)
        self._last = None
        self._steps = 0
        self._max_steps = min(task.max_steps, need + self._slack)
        self._free = bool((options or {}).get("free"))
        self._has_ended = False
        info = {
            "instruction": self._scene.instruction,
            "task": task.id,
            "seed": seed,
            "need": need,
            "max_steps": self._max_steps,
        }
        return self._observe(), info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform one action. Raises EnvError if no episode is being played."""
        scene, app = self._playing()
        if self._has_ended:
            raise EnvError("the episode is over; call reset before the next step")
        self._steps += 1
        app.dispatch(action)
        verdict = self.evaluate()
        reached = scene.over or (scene.ends_at_goal and verdict.outcome != "fail")
        claims_end = isinstance(action, Done | Fail | Answer)
        terminated = claims_end or (reached and not self._free)
        truncated = not (terminated or self._free) and self._steps >= self._max_steps
        self._has_ended = terminated or truncated
        info: dict[str, Any] = {"steps": self._steps}
        if self._has_ended:
            info["verdict"] = verdict
        reward = (verdict.reward or 0.0) if self._has_ended else 0.0
        return self._observe(), reward, terminated, truncated, info

    def evaluate(self) -> Verdict:
        """Return the scene's verdict on the present state; invalid if its evaluator fails."""
        scene, _ = self._playing()
        try:
            return scene.evaluate()
        except Exception as error:  # noqa: BLE001 - whatever broke is not the policy's fault
            return Verdict("invalid", f"the evaluator broke: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Forget the episode; may be called twice."""
        self._scene = self._app = None
        self._has_ended = True

    def widgets(self) -> list[WidgetInfo]:
        """Return the widgets that can be seen and reached on the present screen."""
        return self._playing()[1].widgets()

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached, in reading order."""
        return elements_of(nodes_of(self._playing()[1]))

    def state(self) -> ScreenState:
        """Return the state of the screen: the scene's route or its windows' titles, and the skeleton."""
        scene, app = self._playing()
        return state_of(scene.screen_route or titles_of(app), nodes_of(app))

    def oracle_action(self) -> Action:
        """Return the next action of a shortest solution from the present state."""
        scene, app = self._playing()
        return scene.solve(app)

    def oracle_hint(self) -> str:
        """Return the next action as an instruction for one step; empty unless it clicks a named widget."""
        action = self.oracle_action()
        if not isinstance(action, Click) or action.button != "left":
            return ""
        for widget in reversed(self.widgets()):  # the last one is the topmost
            if widget.bbox.contains(action.x, action.y):
                instructions = phrases(widget.role, widget.name, widget.colour)
                return (
                    instructions[0]
                    if instructions
                    else f"click {widget.label}"
                    if widget.label
                    else ""
                )
        return ""

    def _start(self, task: Task, seed: int) -> tuple[Scene, App]:
        rng = Random(f"{task.id}/{seed}")  # noqa: S311 - repeatable on purpose
        width, height = self._size
        ui = Ui(width, height, rng.choice(self._themes), self._scale)
        scene = self._scenes[task.id](rng, ui)
        return scene, App(ui, scene.layers)

    def _need(self, task: Task, seed: int) -> int:
        """Return the steps of the oracle's solution, counted by playing it on a separate scene.

        Raises EnvError.
        """
        scene, app = self._start(task, seed)
        for steps in range(1, SOLVE_LIMIT):
            action = scene.solve(app)
            app.dispatch(action)
            passed = scene.evaluate().outcome == "pass"
            if isinstance(action, Done) or scene.over or (scene.ends_at_goal and passed):
                if not passed:
                    raise EnvError(
                        f"{task.id} seed {seed}: the solution fails: {scene.evaluate().reason}"
                    )
                return steps
        raise EnvError(f"{task.id} seed {seed}: no solution within {SOLVE_LIMIT} steps")

    def _observe(self) -> Observation:
        """Return the present screen as an observation; one equal to the last is not encoded again."""
        canvas = self._playing()[1].paint()
        pixels = canvas.image.tobytes()
        if self._last is None or self._last[0] != pixels:
            blob = encode(canvas, self._encoding)
            width, height = self._size
            self._last = pixels, Observation(blob, MEDIA_TYPES[self._encoding], width, height)
        return self._last[1]

    def _playing(self) -> tuple[Scene, App]:
        if self._scene is None or self._app is None:
            raise EnvError("no episode is being played; call reset first")
        return self._scene, self._app


def nodes_of(app: App) -> list[Node]:
    """Return the layers as nodes, bottom to top; widgets that a dialog or pop-up blocks have no actions."""
    return [_node(app, layer.root, "dialog" if layer.modal else "window") for layer in app.layers]


def titles_of(app: App) -> str:
    """Return the titles of the windows, bottom to top, and the name of the open menu or list."""
    windows = [widget for layer in app.layers for widget in layer.root.walk() if _is_window(widget)]
    titles = [window.title for window in windows if isinstance(window, Window) and window.title]
    opened = app.find(app.ui.opened) if app.ui.opened else None
    return " > ".join([*titles, *([name] if opened and (name := name_of(opened)) else [])])


def name_of(widget: Widget) -> str:
    """Return the name of a widget for an explorer: its caption, its text, its colour or its icon."""
    text = widget.caption or widget.label or widget.colour
    return text or (widget.name.rpartition(".")[2] if widget.role == "icon" else "")


def _node(app: App, widget: Widget, window: str) -> Node:
    visible_box = _box(widget.visible)
    enabled = bool(getattr(widget, "enabled", True))
    acts = _operations(widget) if visible_box and enabled else ()
    if acts and not _answers(app, widget):
        acts = ()
    children = [_node(app, child, window) for child in widget.children]
    for beside, child in pairwise(children):
        if child.actions and not child.name and beside.role == "text":
            child.name = beside.name
    return Node(
        role=_role(widget, window),
        name=widget.text if isinstance(widget, Label) else name_of(widget),
        box=visible_box,
        actions=acts,
        children=children,
        enabled=enabled,
        current=_is_current(app.ui, widget),
    )


def _role(widget: Widget, window: str) -> str:
    if _is_window(widget):
        return window
    if isinstance(widget, Label):
        return "text"
    return "view" if isinstance(widget, ScrollView) else widget.role


def _operations(widget: Widget) -> tuple[Operation, ...]:
    if isinstance(widget, ScrollView):
        return ("scroll",) if widget.limit() else ()
    if not (widget.role and widget.clickable):
        return ()
    if isinstance(widget, TextField):
        return ("click", "type")
    opens = isinstance(widget, ListRow) and widget.on_open is not None
    return ("click", "double_click") if opens else ("click",)


def _answers(app: App, widget: Widget) -> bool:
    """Return True if a click on the middle of its visible part reaches the widget, not one within it."""
    path = app.path(*widget.visible.centre)
    if isinstance(widget, ScrollView):
        return widget in path
    return next((candidate for candidate in reversed(path) if candidate.clickable), None) is widget


def _is_window(widget: Widget) -> bool:
    return isinstance(widget, Window)


def _is_current(ui: Ui, widget: Widget) -> bool:
    open_tab = bool(getattr(widget, "active", False))
    return open_tab or bool(widget.name and widget.name == ui.opened)


def _box(rect: Rect) -> Box | None:
    is_visible = rect.width > 0 and rect.height > 0
    return (rect.x0, rect.y0, rect.x1, rect.y1) if is_visible else None
