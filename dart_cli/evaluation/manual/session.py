"""One episode in the terminal, and the film of it.

    PlayOptions     which task, and who plays it
    run_play        plays, prints the verdict, keeps the film; returns the exit code
    ManualEpisode   the episode: its environment, its frames, its verdict
    PLAYERS         where the next action comes from: a person, the solution, or chance

Neither `play_episode` nor in_slots is used: there is no policy and no lease, actions come from a
generator that blocks while a person types, and the environment is called in this thread without
deadlines, because a person watches it and has Ctrl-C. Rules for the beginning, the end and the
verdict are those of dart_cli.env.episode.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from rich.console import Console

from bus.errors import (
    ActionCausedError,
    ActionError,
    DartError,
    EnvError,
    NoOracleError,
    UserError,
)
from bus.messages import StopReason
from dart_cli.env import calls
from dart_cli.env.episode import admitted, already_true, stop_reason_after
from dart_cli.evaluation.films import Film, FilmFrame
from dart_cli.evaluation.filmstrip import animation, film_strip
from dart_cli.evaluation.in_process import player_rng, random_click
from dart_cli.evaluation.manual.commands import HELP, parse, spell
from dart_cli.runtime.tables import verdict_words
from envs.actions import Action, action_to_dict
from envs.base import GuiEnv, Observation, Task, Verdict
from envs.registry import check_options, check_parts, find_task, load_suite, make_env
from envs.screenshots import pixels_of

Player = Literal["person", "solution", "random"]

FILM_COLUMNS = 6
FILM_WIDTH = 320  # pixels of a screen in a film
FRAME_MS, LAST_MS = 1200, 3000
FORMATS = (".png", ".gif")

_TOOLS = {
    "next": "let the solution do the next step",
    "judge": "run the evaluator now",
    "look": "show the screen in coarse blocks",
    "quit": "end here",
}


@dataclass(frozen=True)
class PlayOptions:
    """What is played."""

    suite: str
    task: str  # its id, with or without the suite's name
    seed: int = 0
    player: Player = "person"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the suite's environments
    out: Path | None = None  # .png or .gif


def run_play(options: PlayOptions) -> int:
    """Play one episode; returns 0, or 1 if it is invalid or a solution does not pass.

    Raises TaskError for an unknown suite, task or option, MissingPartError, UserError where the
    film cannot be written, EnvError if the GUI cannot be started.
    """
    task = _task(options.suite, options.task)
    check_options(options.suite, options.options)
    if options.out is not None and options.out.suffix.lower() not in FORMATS:
        raise UserError(f"--out {options.out}: want a film called .png or .gif")
    console = Console(markup=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="dart-play-") as folder:
        with _using("make_env"):
            made = make_env(options.suite, **options.options)
        with closing(made) as env:
            check_parts(options.suite, options.options, [task.id])
            session = ManualEpisode(env, task, options.seed, Path(folder), console)
            verdict = session.play(PLAYERS[options.player])
        console.print(_told(verdict), soft_wrap=True)
        if options.out is not None:
            save_film(options.out, Path(folder), session.film(verdict))
            console.print(f"film: {options.out}", soft_wrap=True)
    failed = options.player == "solution" and verdict.outcome != "pass"
    return 1 if failed or verdict.outcome == "invalid" else 0


def _told(verdict: Verdict) -> str:
    return f"{verdict_words(verdict.outcome, verdict.reward)}: {verdict.reason}"


def _task(suite: str, name: str) -> Task:
    loaded = load_suite(suite)
    full = f"{loaded.name}/{name}"
    return loaded.tasks[full] if full in loaded.tasks else find_task(suite, name)


class ManualEpisode:
    """One episode. Screenshots are files of `folder`; `screen.png` there is always the newest."""

    def __init__(self, env: GuiEnv, task: Task, seed: int, folder: Path, console: Console) -> None:
        self.env, self.task, self.seed, self.console = env, task, seed, console
        self.screen: Observation | None = None
        self._folder = folder
        self._frames: list[FilmFrame] = []
        self._last = ""  # file of the newest screenshot
        self._instruction = task.instruction

    def play(self, player: Callable[[ManualEpisode], Iterator[Action]]) -> Verdict:
        """Play until the episode ends or the player stops. Raises EnvError if it cannot begin."""
        with _using("reset"):
            began = calls.reset(self.env, self.task, self.seed)
        screen, self._instruction = began.observation, began.instruction
        self._show("reset", screen)
        size = f"{screen.width}x{screen.height} pixels"
        self.console.print(f"{self.task.id}, seed {self.seed}, {size}", soft_wrap=True)
        self.console.print(self._instruction, soft_wrap=True, style="bold")
        stop: StopReason = "step_limit"
        try:
            reason = already_true(self.task, calls.judge_start(self.env))
            if reason is not None:
                return Verdict("invalid", reason)
            for action in player(self):
                ended = self._step(action)
                if ended is not None:
                    stop = ended
                    break
            return admitted(self.task, stop, self.judge())
        except ActionCausedError as error:
            return Verdict("fail", str(error))
        except EnvError as error:
            return Verdict("invalid", str(error))

    def judge(self) -> Verdict:
        """The verdict on the present state. Raises EnvError where the evaluator broke."""
        with _using("evaluate"):
            return calls.evaluate(self.env)

    def solve(self) -> Action:
        """The next action of the environment's solution. Raises NoOracleError, EnvError."""
        with _using("solve"):
            return calls.solve(self.env)[0]

    def film(self, verdict: Verdict) -> Film:
        """The episode so far."""
        return Film(
            task_id=self.task.id,
            seed=self.seed,
            instruction=self._instruction,
            outcome=verdict.outcome,
            reason=verdict.reason,
            frames=self._frames,
            last=self._last,
        )

    @property
    def screen_file(self) -> Path:
        """The newest screenshot, for a viewer that follows its file."""
        return self._folder / "screen.png"

    def _step(self, action: Action) -> StopReason | None:
        """Perform an action; returns why the episode is over, None if it goes on."""
        done = len(self._frames) + 1
        self.console.print(f"{done}. {spell(action)}", soft_wrap=True)
        self._frames.append(
            FilmFrame(screenshot=self._last, text=spell(action), action=action_to_dict(action))
        )
        with _using("step"):
            stepped = calls.step(self.env, action)
        self._show("step", stepped.observation)
        stop = stop_reason_after(action, stepped)
        if stop in ("gave_up", "done"):
            return stop
        if stop is not None or done >= self.task.max_steps:
            self.console.print(f"no step is left after {done}")
            return "step_limit"
        return None

    def _show(self, what: str, screen: Observation) -> None:
        """Keep and show what call `what` returned. Raises EnvError if it cannot be decoded."""
        try:
            shown = pixels_of(screen.screenshot)
        except EnvError as error:
            raise EnvError(f"{what}: {error}") from None
        self.screen, self._last = screen, f"{len(self._frames)}.shot"
        (self._folder / self._last).write_bytes(screen.screenshot)
        shown.save(self.screen_file, "PNG", compress_level=1)


@contextmanager
def _using(what: str) -> Iterator[None]:
    """Errors of the environment as EnvErrors that name their origin."""
    try:
        yield
    except DartError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{at.filename}, line {at.lineno}"
        raise EnvError(f"{what}: {type(error).__name__}: {error} ({place})") from error


# --- who plays -------------------------------------------------------------------------------


def _person(session: ManualEpisode) -> Iterator[Action]:
    """Lines of standard input, until it ends; a mistake prints the usage and costs no step."""
    write = session.console.print
    write(f"the screen is {session.screen_file}; `help` lists the commands", soft_wrap=True)
    while True:
        line = _ask()
        if line is None or line == "quit":
            return
        if line == "help":
            for usage, meaning in (HELP | _TOOLS).items():
                write(f"{usage:<20} {meaning}")
        elif line == "judge":
            verdict = session.judge()
            write(_told(verdict), soft_wrap=True)
        elif line == "look":
            for row in _blocks(session.screen_file, min(session.console.width, 100)):
                sys.stdout.write(f"{row}\n")
        elif line == "next":
            try:
                yield session.solve()
            except NoOracleError as error:
                write(str(error), soft_wrap=True)
        elif line:
            try:
                yield parse(line)
            except ActionError as error:
                write(str(error), soft_wrap=True)


def _ask() -> str | None:
    """One line; None at the end of the input or where Ctrl-C was pressed."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _solution(session: ManualEpisode) -> Iterator[Action]:
    while True:
        yield session.solve()


def _chance(session: ManualEpisode) -> Iterator[Action]:
    rng = player_rng(session.task, session.seed)
    while session.screen is not None:
        yield random_click(session.screen.width, session.screen.height, rng)


PLAYERS: dict[Player, Callable[[ManualEpisode], Iterator[Action]]] = {
    "person": _person,
    "solution": _solution,
    "random": _chance,
}


# --- pictures --------------------------------------------------------------------------------


def save_film(path: Path, folder: Path, film: Film) -> None:
    """Keep a film as one picture (.png) or moving (.gif). Raises UserError."""
    try:
        if path.suffix.lower() == ".gif":
            first, *others = animation(folder, film)
            lasts = [FRAME_MS] * len(others) + [LAST_MS]
            first.save(path, save_all=True, append_images=others, duration=lasts, loop=0)
            return
        heading = f'{film.task_id}, seed {film.seed}: "{film.instruction}"'
        film_strip(
            folder,
            film,
            f"{len(film.frames)} steps",
            heading,
            most=len(film.frames),
            columns=FILM_COLUMNS,
            width=FILM_WIDTH,
        ).save(path, optimize=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}") from None


def _blocks(path: Path, columns: int) -> Iterator[str]:
    """A picture as lines of half blocks, two pixels a letter, in 24-bit colour."""
    with Image.open(path) as image:
        rows = max(1, round(image.height * columns / image.width / 2))
        small = image.convert("RGB").resize((columns, 2 * rows))
    pixels = small.load()
    assert pixels is not None
    for row in range(rows):
        line = ""
        for column in range(columns):
            upper, lower = pixels[column, 2 * row], pixels[column, 2 * row + 1]
            line += f"\x1b[38;2;{_rgb(upper)};48;2;{_rgb(lower)}m▀"
        yield f"{line}\x1b[0m"


def _rgb(pixel: Any) -> str:
    return ";".join(str(value) for value in pixel)
