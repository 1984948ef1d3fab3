"""The pages of a run's evaluations: all of them, and one, beside another where that is asked for.

evaluations   the list
evaluation    one: scores by task, within k attempts, films, invalid episodes, deviations
shot          a screenshot of one's films
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
from dart_cli.view.screens import action_marks, image_size, screenshot
from dart_cli.view.site import Query, Site, Values

MOST_FILMS = 24
MOST_INVALID = 100
_FAIL_FIRST = {"fail": 0, "invalid": 1, "pass": 2}


def evaluations(run_dir: Path, site: Site, query: Query) -> Values:
    """Each evaluation with its scores, the newest first."""
    rows: list[tuple[str, str, Evaluation | None, list[Part]]] = []
    for name in reversed(evaluations_in(run_dir)):
        try:
            found = read_evaluation(run_dir, name)
        except RunDirectoryError as error:
            rows.append((name, str(error), None, []))
        else:
            rows.append((name, "", found, list(_parts(found) if found else ())))
    return evaluated_page(run_dir, site, query) | {"rows": rows}


def evaluation(run_dir: Path, site: Site, query: Query, name: str) -> Values:
    """One evaluation, and with `?against=NAME` what differs from that one. Raises UserError."""
    names = evaluations_in(run_dir)
    found = _of(run_dir, names, name)
    against = query.one_of("against", [each for each in names if each != name])
    films = sorted(read_films(run_dir, name), key=lambda film: _FAIL_FIRST[film.outcome])
    values = evaluated_page(run_dir, site, query) | {
        "found": found,
        "parts": list(_parts(found)),
        "films": [_film(run_dir, site, name, film) for film in films[:MOST_FILMS]],
        "more_films": max(0, len(films) - MOST_FILMS),
        "invalid": [row for row in found.episodes if row.outcome == "invalid"],
        "most_invalid": MOST_INVALID,
        "others": [each for each in reversed(names) if each != name],
        "against": against,
        "comparison": None,
        "compared": [],
        "no_comparison": "",
    }
    if against is not None:
        try:
            comparison = compare(_of(run_dir, names, against), found)
        except UserError as error:
            return values | {"no_comparison": str(error)}
        compared = [(mode, difference_text(comparison, mode)) for mode in comparison.modes]
        return values | {"comparison": comparison, "compared": compared}
    return values


def shot(run_dir: Path, name: str, file: str) -> bytes:
    """Return a screenshot of an evaluation's films. Raises UserError for any other file."""
    if name in evaluations_in(run_dir):
        for film in read_films(run_dir, name):
            if file == film.last or any(file == each.screenshot for each in film.frames):
                with suppress(OSError):
                    return (films_dir(run_dir, name) / file).read_bytes()
    raise UserError(f"no screenshot {file} in evaluation {name}")


# --- parts -----------------------------------------------------------------------------------


def _of(run_dir: Path, names: Sequence[str], name: str) -> Evaluation:
    found = read_evaluation(run_dir, name) if name in names else None
    if found is None:
        raise UserError(f"no evaluation {name} in {run_dir}{did_you_mean(name, names)}")
    return found


@dataclass(frozen=True)
class Part:
    """The tasks, or the compositions, of an evaluation, played in one mode."""

    label: str
    rows: list[TaskScore]  # by task
    whole: TaskScore
    estimates: list[PassAtK]

    @property
    def counts(self) -> list[int]:
        """The k above 1 of which some task has a pass@k."""
        return sorted({k for row in self.rows for k in row.pass_at if k > 1})

    @property
    def is_partial(self) -> bool:
        """Whether rewards say more than success."""
        return any(row.is_partial for row in self.rows)

    @property
    def chart(self) -> Markup:
        """pass@k with its interval and pass^k by k; empty where there was one attempt."""
        if len(self.estimates) < 2:
            return Markup("")
        band = [each.any_interval for each in self.estimates if each.any_interval is not None]
        band = band if len(band) == len(self.estimates) else []
        some = [(float(each.k), each.any) for each in self.estimates]
        every = [(float(each.k), each.every) for each in self.estimates]
        series = [Series("pass@k", some, "mean", band), Series("pass^k", every, "guess")]
        chart = line_chart(series, x="attempts, k", y="share of instances", low=0.0, high=1.0)
        return chart + legend(series)


def _parts(found: Evaluation) -> Iterator[Part]:
    for mode, score in found.modes.items():
        part = Part(mode, score.tasks, score.overall, score.pass_at)
        composed = Part(
            f"{mode}, compositions", score.compositions, score.composed, score.composed_pass_at
        )
        yield from (each for each in (part, composed) if each.rows)


def _film(run_dir: Path, site: Site, name: str, film: Film) -> Values:
    """Its frames with their pictures; one whose screenshot is gone has none."""

    def picture(file: str, alt: str, action: dict[str, Any] | None = None) -> Markup:
        try:
            size = image_size((films_dir(run_dir, name) / file).read_bytes())
        except OSError:
            size = None
        if size is None:
            return Markup("")
        image = site.picture(file, *size, of=("evaluations", name, "shots"))
        return screenshot(image, *size, action_marks(action, size[0]), alt)

    frames = [
        (picture(each.screenshot, f"screen before step {number}", each.action), each.text)
        for number, each in enumerate(film.frames)
    ]
    return {
        "film": film,
        "frames": frames,
        "last": picture(film.last, "screen after the last action"),
    }
