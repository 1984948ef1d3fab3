"""Films of episodes as picture files: the films of the report, and one trajectory of a run or its pool.

pick_films       pairs of the same held-out episode before and after: failed before, passed after
draw_films       these pairs as one picture, with the actions drawn on the screenshots
draw_trajectory  all steps of one trajectory: `dart data show --film`
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from bus.errors import UserError
from dart_cli.data.store.reader import Reader
from dart_cli.evaluation.films import Film, FilmFrame, films_dir
from dart_cli.evaluation.filmstrip_png import film_strip, save_animation
from dart_cli.evaluation.results import AFTER, BEFORE
from dart_cli.inspection.trajectories import TrajectoryDetails

MAX_FILMS = 3
"""Pairs of films in a report."""


def pick_films(before: Sequence[Film], after: Sequence[Film]) -> list[tuple[Film, Film]]:
    """Return pairs of films of the same episode, one per task, the clearest first, at most `MAX_FILMS`.

    A pair is clear if the episode failed before and passed after, in many steps.
    """
    earlier = {(film.task_id, film.seed): film for film in before}
    pairs = [
        (earlier[film.task_id, film.seed], film)
        for film in after
        if (film.task_id, film.seed) in earlier and film.outcome != "invalid"
    ]

    def worth(pair: tuple[Film, Film]) -> tuple[int, int]:
        was, now = pair
        return 2 * (now.outcome == "pass") + (was.outcome == "fail"), len(now.frames)

    best: dict[str, tuple[Film, Film]] = {}
    for pair in sorted(pairs, key=worth, reverse=True):
        best.setdefault(pair[1].task_id, pair)
    return list(best.values())[:MAX_FILMS]


def draw_films(path: Path, run_dir: Path, pairs: Sequence[tuple[Film, Film]]) -> Path:
    """Draw the pairs as one picture, each with its instruction, and return the path."""
    strips = []
    for was, now in pairs:
        strips.append(film_strip(films_dir(run_dir, BEFORE), was, BEFORE, _heading(was)))
        strips.append(film_strip(films_dir(run_dir, AFTER), now, AFTER, ""))
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path, optimize=True)
    return path


def draw_trajectory(path: Path, reader: Reader, details: TrajectoryDetails) -> Path:
    """Draw all steps of one trajectory, as an animation if `path` ends in `.gif`, and return the path.

    Raises UserError if its screenshots were removed, or if the file cannot be written.
    """
    subject, row = details.subject, details.subject.trajectory
    keys = [step.screenshot for step in details.steps]
    if row is not None and row.final_screenshot is not None:
        keys.append(row.final_screenshot)
    images = reader.screenshots(keys)
    if not details.steps or len(images) < len(set(keys)):
        removed = "its screenshots were removed to keep data.max_gb"
        why = removed if details.steps else "it has no step yet"
        raise UserError(f"no film of {subject.id}: {why}; choose another trajectory")
    film = Film(
        task_id=subject.task_id,
        seed=subject.task_seed,
        instruction=details.instruction,
        outcome=(row.outcome if row is not None else "pass") or "invalid",
        reason=(row.verdict_reason if row is not None else "") or "",
        frames=[
            FilmFrame(
                screenshot=step.screenshot,
                text=step.text,
                action=step.action,
                pointed=step.pointed,
                more_actions=step.more_actions,
            )
            for step in details.steps
        ],
        last=keys[-1],
    )
    with tempfile.TemporaryDirectory() as folder:
        for key, image in images.items():
            (Path(folder) / key).write_bytes(image)
        try:
            if path.suffix.lower() == ".gif":
                save_animation(path, Path(folder), film)
                return path
            most = len(film.frames)
            picture = film_strip(Path(folder), film, subject.id, _heading(film), most=most)
            picture.save(path, format="PNG", optimize=True)
        except OSError as error:
            raise UserError(f"--film {path}: cannot be written: {error.strerror}") from None
    return path


def _heading(film: Film) -> str:
    return f'{film.task_id}, seed {film.seed}: "{film.instruction}"'
