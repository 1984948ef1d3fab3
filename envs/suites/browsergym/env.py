"""BrowsergymEnv: plays BrowserGym's tasks in a process that has the package.

The reward of a task is BrowserGym's own, which it computes after each step. A page that hangs, a browser
that dies and a task that cannot be set up raise EnvError; the process is then killed with its browser, and
the next reset starts a new one.

An instruction is text, so the images of a goal are shown below the first screenshot (with_images).
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from PIL import Image, UnidentifiedImageError

from bus.errors import EnvError
from envs.contract.actions import Action, Answer, Done, Fail, Goto, Wait
from envs.contract.base import Observation, ObservedKind, Task, Verdict
from envs.contract.observed_texts import MOST_CHARS, Widget, bounded, outline
from envs.contract.screenshots import as_seen
from envs.suites.browsergym.calls import CallWriter
from envs.suites.browsergym.tasks import benchmark_of, need_interpreter, source
from envs.tools.browser.process import (
    find_chromium,
    make_profile,
    remove_profile,
    remove_stale_profiles,
)
from envs.tools.child_program import ChildProgram

GoalImages = Literal["below", "refuse"]

OPENED = ("http", "https")
"""Schemes that `goto` opens, so that a policy cannot read the files of this host."""


@dataclass(frozen=True)
class Settings:
    """The options of make_env."""

    python: str  # the interpreter; empty: the one of find_interpreter
    chromium: str  # the browser's binary; empty: Debian's
    pages: str  # address of MiniWoB's pages, ends with /; empty: none
    pause_s: float | None  # time for a page to react; None: its benchmark's
    size: tuple[int, int] | None  # of the viewport, pixels; None: the task's
    deadline_s: float  # of a step
    reset_s: float  # of a reset
    goal_images: GoalImages
    task_options: Mapping[str, Any] = field(default_factory=dict)  # given to the task's class
    observe: Sequence[ObservedKind] = ()


class BrowsergymEnv:
    """Plays suite `browsergym`. See envs.contract.base.GuiEnv for the contract."""

    def __init__(
        self, find_task: Callable[[Mapping[str, Any] | None], Task], settings: Settings
    ) -> None:
        """Make an environment; `find_task` returns the task that a reset names, or raises TaskError."""
        self._find_task = find_task
        self._settings = settings
        self._program: ChildProgram | None = None
        self._folder: tuple[Path, int] | None = None  # for its temporary files, and the lock
        self._task: Task | None = None
        self._writer = CallWriter()
        self._answer: dict[str, Any] = {}
        # Whether BrowserGym's reward of the present state is in `_answer`.
        self._is_evaluated = False
        self._over = True
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None if no process runs."""
        return None if self._program is None else self._program.pid

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id, in a new browser."""
        if self._closed:
            raise EnvError("the environment is closed")
        task = self._find_task(options)
        name = task.params["name"]
        self._task, self._over, self._is_evaluated = None, True, False
        pause_s = self._settings.pause_s
        request = {
            "do": "reset",
            "task": name,
            "seed": 0 if seed is None else seed,
            "chromium": str(find_chromium(self._settings.chromium)),
            "pause_s": benchmark_of(name).pause_s if pause_s is None else pause_s,
            "viewport": self._settings.size,
            "task_options": dict(self._settings.task_options),
            "tree": self._tree,
        }
        answer, [screenshot, *images] = self._ask(request, self._settings.reset_s, f"reset {name}")
        if images and self._settings.goal_images == "refuse":
            raise EnvError(
                f"{task.id}: its goal has {len(images)} images, and env.options.goal_images refuses them"
            )
        if images:
            screenshot = with_images(screenshot, images)
        self._writer = CallWriter()
        self._task, self._over = task, False
        return self._observation(answer, screenshot), {"instruction": answer["goal"]}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action, after which BrowserGym evaluates the state. Raises EnvError."""
        task = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        if isinstance(action, Goto):
            action = opened(action)
        wait_s = action.seconds if isinstance(action, Wait) else 0.0
        request = {"do": "act", "calls": self._writer.calls_of(action), "tree": self._tree}
        deadline_s = self._settings.deadline_s + wait_s
        answer, [screenshot] = self._ask(request, deadline_s, f"{action.kind} in {task.id}")
        self._answer, self._is_evaluated = answer, True
        self._over = answer["ended"] or isinstance(action, Done | Fail | Answer)
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        info = {"raw_reward": answer["reward"], "action_error": answer["action_error"]}
        return self._observation(answer, screenshot), reward, self._over, False, info

    def evaluate(self) -> Verdict:
        """Return BrowserGym's reward of the present state as a verdict. Raises EnvError if it gives none."""
        task = self._playing()
        if not self._is_evaluated:
            self._answer, _ = self._ask(
                {"do": "evaluate"}, self._settings.deadline_s, f"evaluate {task.id}"
            )
            self._is_evaluated = True
        why = f": {self._answer['why']}" if self._answer["why"] else ""
        return Verdict.scored(self._answer["reward"], f"BrowserGym's reward{why}")

    def close(self) -> None:
        """End the process and its browser; may be called twice."""
        self._closed = True
        self._end()

    @property
    def _tree(self) -> bool:
        return "accessibility" in self._settings.observe

    def _playing(self) -> Task:
        if self._task is None:
            raise EnvError("no episode is being played; call reset first")
        return self._task

    def _ask(
        self, request: Mapping[str, Any], deadline_s: float, what: str
    ) -> tuple[dict[str, Any], list[bytes]]:
        try:
            return self._start().ask(request, deadline_s, what)
        except EnvError:
            self._end()  # the fault may be in its browser
            raise

    def _start(self) -> ChildProgram:
        """Return the running process, or start a new one."""
        if self._program is None:
            python = need_interpreter(self._settings.python)
            remove_stale_profiles()
            self._folder = make_profile()
            variables = {"TMPDIR": str(self._folder[0])}
            if self._settings.pages and "MINIWOB_URL" not in os.environ:
                variables["MINIWOB_URL"] = self._settings.pages
            self._program = ChildProgram(python, source(), variables=variables)
        return self._program

    def _end(self) -> None:
        """End the process and its browser; remove its files."""
        program, self._program, self._task = self._program, None, None
        folder, self._folder = self._folder, None
        if program is not None:
            program.close()
        if folder is not None:
            remove_profile(folder[0])
            os.close(folder[1])

    def _observation(self, answer: Mapping[str, Any], screenshot: bytes) -> Observation:
        if screenshot[:8] != b"\x89PNG\r\n\x1a\n":
            raise EnvError("the screenshot is no PNG")
        width, height = struct.unpack(">II", screenshot[16:24])
        texts: dict[ObservedKind, str] = {}
        if self._tree:
            widgets = [
                Widget(role, name, text, tuple(box)) for role, name, text, box in answer["widgets"]
            ]
            visible = [widget for widget in widgets if _meets(widget.box, width, height)]
            texts["accessibility"] = bounded("accessibility", outline(visible), MOST_CHARS)
        return Observation(screenshot, "image/png", width, height, texts)


def opened(action: Goto) -> Action:
    """Return the action with a complete address, or a wait of no time if that address may not be opened."""
    url = action.url.strip()
    if "://" not in url and url != "about:blank":
        url = f"http://{url}"
    try:
        allowed = url == "about:blank" or urlsplit(url).scheme in OPENED
    except ValueError:  # no address at all
        allowed = False
    return Goto(url=url) if allowed else Wait(seconds=0)


def _meets(box: tuple[int, int, int, int] | None, width: int, height: int) -> bool:
    """Return True if a part of the box is on the screen."""
    if box is None:
        return False
    left, top, wide, high = box
    return left < width and top < height and left + wide > 0 and top + high > 0


GAP = 8  # pixels around each image
MOST_PIXELS = 50_000_000  # of one image of a goal
_BACKGROUND = "white"


def with_images(screenshot: bytes, images: Sequence[bytes]) -> bytes:
    """Return a PNG of the screenshot with the images side by side below it, in half its height.

    Points of the page keep their coordinates; a point below the page hits nothing. Raises EnvError for an
    image that cannot be read.
    """
    screen = as_seen(Image.open(io.BytesIO(screenshot)))
    strip = screen.height // 2
    width = (screen.width - GAP) // len(images) - GAP
    if width < 1 or strip <= 2 * GAP:
        raise EnvError(f"{len(images)} images of a goal do not fit below {screen.size} pixels")
    whole = Image.new("RGB", (screen.width, screen.height + strip), _BACKGROUND)
    whole.paste(screen)
    for index, encoded in enumerate(images):
        image = _read(encoded)
        image.thumbnail((width, strip - 2 * GAP))
        whole.paste(image, (GAP + index * (width + GAP), screen.height + GAP))
    png = io.BytesIO()
    whole.save(png, "PNG")
    return png.getvalue()


def _read(encoded: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(encoded))
        if image.width * image.height > MOST_PIXELS:
            raise EnvError(f"an image of the goal has {image.width}x{image.height} pixels")
        return as_seen(image)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise EnvError(f"an image of the goal cannot be read: {error}") from None
