"""`dart env play`: play one episode in the terminal, and film it.

    run_play      plays, prints the verdict, writes the film, returns the exit code
    HandEpisode   an episode that a person, the solution or random clicks play: its screens and its film

A person types the compact language (dart_cli/language/parsers/compact.py) in pixels of the screenshot.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from bus.errors import ActionError, EnvError, NoOracleError, UserError
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import AsyncEnv, make_async_env
from dart_cli.evaluation.films import Film, FilmFrame
from dart_cli.evaluation.filmstrip_png import film_strip, save_animation
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers import compact
from dart_cli.player.actions import ActedEpisode, play_actions
from dart_cli.player.episodes import env_of_suite, player_rng, random_click
from dart_cli.runtime.background import in_daemon_thread, run_until_stopped
from dart_cli.runtime.options import read_options
from dart_cli.runtime.tables import verdict_words
from dart_cli.runtime.waits import OpenWaits
from dart_cli.suite_check import PlayOptions
from envs.contract.actions import Action, action_to_dict
from envs.contract.base import Observation, Task, Verdict
from envs.contract.registry import check_options, check_parts, find_task, load_suite
from envs.contract.screenshots import as_seen, pixels_of

FILM_COLUMNS = 6
FILM_WIDTH = 320  # width of a screen in a film, in pixels
FORMATS = (".png", ".gif")

CALLS = (compact.__doc__ or "").partition("Calls:\n")[2].partition("\n\n")[0]
TOOLS = """\
    next      let the solution do the next step
    evaluate  run the evaluator now
    look      show the screen in coarse blocks
    quit      end here"""


def run_play(options: PlayOptions) -> int:
    """Play one episode and return the exit code.

    It is 1 if the episode is invalid or a solution does not pass, 128 + number after a signal, else 0. Raises
    TaskError for an unknown suite, task or option, MissingPartError, UserError if the film cannot be written,
    EnvError if the episode does not begin.
    """
    if options.solution and options.random:
        raise UserError("--solution and --random are two players: choose one")
    task = _task(options.suite, options.task)
    env = env_of_suite(options.suite, read_options(options.options))
    check_options(env.suite, env.options)
    if options.out is not None and options.out.suffix.lower() not in FORMATS:
        raise UserError(f"--out {options.out}: want a film called .png or .gif")
    check_parts(env.suite, env.options, [task.id])
    console = Console(markup=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="dart-play-") as folder:
        hand = HandEpisode(task, options, Path(folder), console)
        acted = ActedEpisode()
        signal_code = run_until_stopped(hand.play(env, acted), hand.waits, lambda: None)
        if not hand.has_begun:
            if signal_code:
                return signal_code
            raise EnvError(acted.reason)
        verdict = Verdict("invalid", "stopped") if signal_code else hand.verdict(acted)
        console.print(_verdict_line(verdict), soft_wrap=True)
        for line in acted.app_log:
            console.print(f"the application reported: {line}", soft_wrap=True)
        if options.out is not None:
            save_film(options.out, Path(folder), hand.film(verdict))
            console.print(f"film: {options.out}", soft_wrap=True)
    if signal_code:
        return signal_code
    failed = options.solution and verdict.outcome != "pass"
    return 1 if failed or verdict.outcome == "invalid" else 0


def _verdict_line(verdict: Verdict) -> str:
    """Return a verdict in one line: outcome, reward, reason."""
    return f"{verdict_words(verdict.outcome, verdict.reward)}: {verdict.reason}"


def _task(suite: str, name: str) -> Task:
    """Return the task with this id, which may lack the suite's name. Raises TaskError."""
    loaded = load_suite(suite)
    full = f"{loaded.name}/{name}"
    return loaded.tasks[full] if full in loaded.tasks else find_task(suite, name)


class HandEpisode:
    """One episode that is played in the terminal.

    Its screenshots are files of `folder`; `screen.png` is the newest.
    """

    def __init__(self, task: Task, options: PlayOptions, folder: Path, console: Console) -> None:
        self._task, self._options, self._folder, self._console = task, options, folder, console
        self._action_parser = compact.CompactParser()
        self._rng = player_rng(task, options.seed)
        self._frames: list[FilmFrame] = []
        self._last = ""  # file of the newest screenshot
        self._instruction = task.instruction
        self.waits = OpenWaits()

    @property
    def has_begun(self) -> bool:
        """Whether the episode has a first screen."""
        return bool(self._last)

    async def play(self, config: EnvConfig, acted: ActedEpisode) -> None:
        """Play until the episode ends or the player stops; the outcome is written into `acted`."""
        env = make_async_env(config, "play", self.waits)

        async def act(screen: Observation) -> Action | None:
            if self._options.random:
                action: Action | None = random_click(screen.width, screen.height, self._rng)
            elif self._options.solution:
                action = (await env.solve())[0]
            else:
                action = await self._typed(env, screen)
            if action is not None:
                self._add_frame(action, screen)
            return action

        try:
            await play_actions(env, self._task, self._options.seed, act, acted, self._watch)
        finally:
            await env.close()

    def verdict(self, acted: ActedEpisode) -> Verdict:
        """Return the verdict; `invalid` if there is no outcome, e.g. because the task has no solution."""
        return Verdict(acted.outcome or "invalid", acted.reason, acted.reward)

    def film(self, verdict: Verdict) -> Film:
        """Return the film of the episode so far."""
        return Film(
            task_id=self._task.id,
            seed=self._options.seed,
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

    def _add_frame(self, action: Action, screen: Observation) -> None:
        """Print an action, and add it to the film with the screen before it."""
        text, fields = self._format(action, screen), action_to_dict(action)
        self._frames.append(FilmFrame(screenshot=self._last, text=text, action=fields))
        self._console.print(f"{len(self._frames)}. {text}", soft_wrap=True)

    def _watch(self, action: Action | None, screen: Observation, instruction: str) -> None:
        """Save a screen; `action` is None for the first one. Raises EnvError if it cannot be decoded."""
        write = self._console.print
        if action is None:
            self._instruction = instruction
            size = f"{screen.width}x{screen.height} pixels"
            write(f"{self._task.id}, seed {self._options.seed}, {size}", soft_wrap=True)
            write(instruction, soft_wrap=True, style="bold")
            if not (self._options.solution or self._options.random):
                write(f"the screen is {self.screen_file}; `help` lists the calls", soft_wrap=True)
        pixels = pixels_of(screen.screenshot)
        self._last = f"{len(self._frames)}.shot"
        (self._folder / self._last).write_bytes(screen.screenshot)
        pixels.save(self.screen_file, "PNG", compress_level=1)
        if len(self._frames) == self._task.max_steps:
            write(f"no step is left after {len(self._frames)}")

    def _format(self, action: Action, screen: Observation) -> str:
        """Return an action as text, in the compact language if it can be written in it."""
        try:
            return self._action_parser.format(action, _pixels(screen))
        except ActionError:
            # The compact language lacks this action, such as a wheel by other notches.
            return str(action_to_dict(action))

    async def _typed(self, env: AsyncEnv, screen: Observation) -> Action | None:
        """Read lines until one is an action, and return it; None at the end.

        A mistake is explained and costs no step.
        """
        write = self._console.print
        while True:
            line = await _ask()
            if line is None or line == "quit":
                return None
            if line == "help":
                write(f"{CALLS}\n{TOOLS}", soft_wrap=True)
            elif line == "evaluate":
                write(_verdict_line(await env.evaluate()), soft_wrap=True)
            elif line == "look":
                for row in _blocks(self.screen_file, min(self._console.width, 100)):
                    sys.stdout.write(f"{row}\n")
            elif line == "next":
                try:
                    return (await env.solve())[0]
                except NoOracleError as error:
                    write(str(error), soft_wrap=True)
            elif line:
                try:
                    return self._action_parser.parse(line, _pixels(screen))
                except ActionError as error:
                    write(f"{error}; `help` lists the calls", soft_wrap=True)


def _pixels(screen: Observation) -> CoordinateMap:
    """Return a map for coordinates that are pixels of the screenshot."""
    return CoordinateMap(screen.width, screen.height, screen.width, screen.height)


async def _ask() -> str | None:
    """Read a line from standard input; return None at its end, or if Ctrl-C was pressed."""
    try:
        return (await in_daemon_thread(lambda: input("> " if sys.stdin.isatty() else ""))).strip()
    except EOFError:
        return None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return None


# --- pictures --------------------------------------------------------------------------------


def save_film(path: Path, folder: Path, film: Film) -> None:
    """Write a film as one picture (.png) or as an animation (.gif).

    Raises UserError if it cannot be written.
    """
    try:
        if path.suffix.lower() == ".gif":
            save_animation(path, folder, film)
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
    """Yield a picture as lines of half-block letters in 24-bit colour; each letter shows two pixels."""
    with Image.open(path) as image:
        visible = as_seen(image)
    rows = max(1, round(visible.height * columns / visible.width / 2))
    small = visible.resize((columns, 2 * rows))
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
