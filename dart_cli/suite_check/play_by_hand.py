"""`dart env play`: one episode in the terminal, and the film of it.

    run_play       plays, prints the verdict, keeps the film; returns the exit code
    PlayedByHand   the episode: its screens, its film, who plays

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
FILM_WIDTH = 320  # pixels of a screen in a film
FORMATS = (".png", ".gif")

CALLS = (compact.__doc__ or "").partition("Calls:\n")[2].partition("\n\n")[0]
TOOLS = """\
    next      let the solution do the next step
    judge     run the evaluator now
    look      show the screen in coarse blocks
    quit      end here"""


def run_play(options: PlayOptions) -> int:
    """Play one episode; returns 0, 1 if it is invalid or a solution does not pass, or the code of a signal.

    Raises TaskError for an unknown suite, task or option, MissingPartError, UserError where the
    film cannot be written, EnvError if the episode does not begin.
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
        hand = PlayedByHand(task, options, Path(folder), console)
        acted = ActedEpisode()
        stopped = run_until_stopped(hand.play(env, acted), hand.waits, lambda: None)
        if not hand.has_begun:
            if stopped:
                return stopped
            raise EnvError(acted.reason)
        verdict = Verdict("invalid", "stopped") if stopped else hand.verdict(acted)
        console.print(_told(verdict), soft_wrap=True)
        if options.out is not None:
            save_film(options.out, Path(folder), hand.film(verdict))
            console.print(f"film: {options.out}", soft_wrap=True)
    if stopped:
        return stopped
    failed = options.solution and verdict.outcome != "pass"
    return 1 if failed or verdict.outcome == "invalid" else 0


def _told(verdict: Verdict) -> str:
    return f"{verdict_words(verdict.outcome, verdict.reward)}: {verdict.reason}"


def _task(suite: str, name: str) -> Task:
    loaded = load_suite(suite)
    full = f"{loaded.name}/{name}"
    return loaded.tasks[full] if full in loaded.tasks else find_task(suite, name)


class PlayedByHand:
    """One episode. Screenshots are files of `folder`; `screen.png` there is always the newest."""

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
        """Return True if there is a screen."""
        return bool(self._last)

    async def play(self, config: EnvConfig, acted: ActedEpisode) -> None:
        """Play into `acted` until the episode ends or the player stops."""
        env = make_async_env(config, "play", self.waits)

        async def act(screen: Observation) -> Action | None:
            if self._options.random:
                action: Action | None = random_click(screen.width, screen.height, self._rng)
            elif self._options.solution:
                action = (await env.solve())[0]
            else:
                action = await self._typed(env, screen)
            if action is not None:
                self._begin(action, screen)
            return action

        try:
            await play_actions(env, self._task, self._options.seed, act, acted, self._watch)
        finally:
            await env.close()

    def verdict(self, acted: ActedEpisode) -> Verdict:
        """Return what counts: a task without a solution cannot be played by it."""
        return Verdict(acted.outcome or "invalid", acted.reason, acted.reward)

    def film(self, verdict: Verdict) -> Film:
        """Return the episode so far."""
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

    def _begin(self, action: Action, screen: Observation) -> None:
        """Print an action, and keep it with its screen."""
        told = self._spelt(action, screen)
        done = action_to_dict(action)
        self._frames.append(FilmFrame(screenshot=self._last, text=told, action=done))
        self._console.print(f"{len(self._frames)}. {told}", soft_wrap=True)

    def _watch(self, action: Action | None, screen: Observation, instruction: str) -> None:
        """Keep a screen. Raises EnvError where it cannot be decoded."""
        write = self._console.print
        if action is None:
            self._instruction = instruction
            size = f"{screen.width}x{screen.height} pixels"
            write(f"{self._task.id}, seed {self._options.seed}, {size}", soft_wrap=True)
            write(instruction, soft_wrap=True, style="bold")
            if not (self._options.solution or self._options.random):
                write(f"the screen is {self.screen_file}; `help` lists the calls", soft_wrap=True)
        shown = pixels_of(screen.screenshot)
        self._last = f"{len(self._frames)}.shot"
        (self._folder / self._last).write_bytes(screen.screenshot)
        shown.save(self.screen_file, "PNG", compress_level=1)
        if len(self._frames) == self._task.max_steps:
            write(f"no step is left after {len(self._frames)}")

    def _spelt(self, action: Action, screen: Observation) -> str:
        try:
            return self._action_parser.format(action, _pixels(screen))
        except ActionError:  # another language's: a wheel by other notches
            return str(action_to_dict(action))

    async def _typed(self, env: AsyncEnv, screen: Observation) -> Action | None:
        """Return the next action of a person; None at the end. A mistake prints why, and costs no step."""
        write = self._console.print
        while True:
            line = await _ask()
            if line is None or line == "quit":
                return None
            if line == "help":
                write(f"{CALLS}\n{TOOLS}", soft_wrap=True)
            elif line == "judge":
                write(_told(await env.evaluate()), soft_wrap=True)
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
    """Numbers that are pixels of the screenshot."""
    return CoordinateMap(screen.width, screen.height, screen.width, screen.height)


async def _ask() -> str | None:
    """One line; None at the end of the input or where Ctrl-C was pressed."""
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
    """Keep a film as one picture (.png) or moving (.gif). Raises UserError."""
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
    """Yield a picture as lines of half blocks, two pixels a letter, in 24-bit colour."""
    with Image.open(path) as image:
        seen = as_seen(image)
    rows = max(1, round(seen.height * columns / seen.width / 2))
    small = seen.resize((columns, 2 * rows))
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
