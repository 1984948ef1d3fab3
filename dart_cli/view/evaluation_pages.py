"""The pages of a run's evaluations: the list, and one evaluation, which may be compared with another.

evaluations   the values of the list
evaluation    the values of one: scores by task, within k attempts, films, invalid episodes, deviations
shot          a screenshot of the films of an evaluation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bus.error_texts import did_you_mean
from bus.errors import RunDirectoryError, UserError
from dart_cli.evaluation.compare import compare, difference_text
from dart_cli.evaluation.films import Film, films_dir, read_films
from dart_cli.evaluation.results import (
    Evaluation,
    PassAtK,
    TaskScore,
    evaluations_in,
    read_evaluation,
)
from dart_cli.inspection.curves import Series
from dart_cli.view.charts import legend, line_chart
from dart_cli.view.run_pages import evaluated_page
from dart_cli.view.screenshot_svg import action_marks, image_size, screenshot
from dart_cli.view.site import Query, Site, Values

MOST_FILMS = 24
MOST_INVALID = 100
_FAIL_FIRST = {"fail": 0, "invalid": 1, "pass": 2}


def evaluations(run_dir: Path, site: Site, query: Query) -> Values:
    """Return the values of the list of evaluations with their scores, the newest first."""
    rows: list[tuple[str, str, Evaluation | None, list[Part]]] = []
    for name in reversed(evaluations_in(run_dir)):
        try:
            one = read_evaluation(run_dir, name)
        except RunDirectoryError as error:
            rows.append((name, str(error), None, []))
        else:
            rows.append((name, "", one, list(_parts(one) if one else ())))
    return evaluated_page(run_dir, site, query) | {"rows": rows}


def evaluation(run_dir: Path, site: Site, query: Query, name: str) -> Values:
    """Return the values of one evaluation, compared with another one by `?against=NAME`. Raises UserError."""
    names = evaluations_in(run_dir)
    one = _read(run_dir, names, name)
    others = [other for other in names if other != name]
    against = query.one_of("against", others)
    films = sorted(read_films(run_dir, name), key=lambda film: _FAIL_FIRST[film.outcome])
    values = evaluated_page(run_dir, site, query) | {
        "evaluation": one,
        "parts": list(_parts(one)),
        "films": [_film(run_dir, site, name, film) for film in films[:MOST_FILMS]],
        "more_films": max(0, len(films) - MOST_FILMS),
        "invalid": [row for row in one.episodes if row.outcome == "invalid"],
        "most_invalid": MOST_INVALID,
        "others": others[::-1],
        "against": against,
        "comparison": None,
        "differences": [],
        "no_comparison": "",
    }
    if against is not None:
        try:
            comparison = compare(_read(run_dir, names, against), one)
        except UserError as error:
            return values | {"no_comparison": str(error)}
        differences = [(mode, difference_text(comparison, mode)) for mode in comparison.modes]
        return values | {"comparison": comparison, "differences": differences}
    return values


def shot(run_dir: Path, name: str, file: str) -> bytes:
    """Return a screenshot of an evaluation's films. Raises UserError for any other file."""
    if name in evaluations_in(run_dir):
        for film in read_films(run_dir, name):
            if file == film.last or any(file == frame.screenshot for frame in film.frames):
                with suppress(OSError):
                    return (films_dir(run_dir, name) / file).read_bytes()
    raise UserError(f"no screenshot {file} in evaluation {name}")


# --- parts -----------------------------------------------------------------------------------


def _read(run_dir: Path, names: Sequence[str], name: str) -> Evaluation:
    """Return the evaluation `name`, which must be one of `names`. Raises UserError if it is not."""
    evaluation = read_evaluation(run_dir, name) if name in names else None
    if evaluation is None:
        raise UserError(f"no evaluation {name} in {run_dir}{did_you_mean(name, names)}")
    return evaluation


@dataclass(frozen=True)
class Part:
    """The trained tasks of an evaluation, or the others, played in one mode."""

    label: str
    rows: list[TaskScore]  # one for each task
    whole: TaskScore
    estimates: list[PassAtK]

    @property
    def counts(self) -> list[int]:
        """The values of k above 1 for which some task has a pass@k."""
        return sorted({k for row in self.rows for k in row.pass_at if k > 1})

    @property
    def is_partial(self) -> bool:
        """Whether some task's mean reward differs from its success, because rewards are partial."""
        return any(row.is_partial for row in self.rows)

    @property
    def chart(self) -> Markup:
        """A chart of pass@k with its interval, and of pass^k; empty if there was one attempt."""
        if len(self.estimates) < 2:
            return Markup("")
        estimates = self.estimates
        band = [row.any_interval for row in estimates if row.any_interval is not None]
        series = [
            Series(
                name="pass@k",
                points=[(float(row.k), row.any) for row in estimates],
                kind="mean",
                band=band if len(band) == len(estimates) else [],
            ),
            Series(
                name="pass^k", points=[(float(row.k), row.every) for row in estimates], kind="guess"
            ),
        ]
        chart = line_chart(series, x="attempts, k", y="share of instances", low=0.0, high=1.0)
        return chart + legend(series)


def _parts(evaluation: Evaluation) -> Iterator[Part]:
    """Yield the trained tasks and the others of each mode that was played."""
    for mode, score in evaluation.modes.items():
        if score.tasks:
            yield Part(
                label=f"{evaluation.part_name(heldout=False)}, {mode}",
                rows=score.tasks,
                whole=score.overall,
                estimates=score.pass_at,
            )
        if score.heldout:
            yield Part(
                label=f"{evaluation.part_name(heldout=True)}, {mode}",
                rows=score.heldout,
                whole=score.heldout_overall,
                estimates=score.heldout_pass_at,
            )


def _film(run_dir: Path, site: Site, name: str, film: Film) -> Values:
    """Return the frames of a film with their pictures; the picture is empty if the screenshot is gone."""

    def picture(file: str, alt: str, actions: Sequence[dict[str, Any]] = ()) -> Markup:
        try:
            size = image_size((films_dir(run_dir, name) / file).read_bytes())
        except OSError:
            size = None
        if size is None:
            return Markup("")
        image = site.picture(file, *size, of=("evaluations", name, "shots"))
        return screenshot(image, *size, action_marks(actions, size[0]), alt)

    frames = [
        (picture(frame.screenshot, f"screen before step {number}", frame.actions), frame.text)
        for number, frame in enumerate(film.frames)
    ]
    return {
        "film": film,
        "frames": frames,
        "last": picture(film.last, "screen after the last action"),
    }
