"""The pages of a run's evaluations: all of them, and one, beside another where that is asked for.

evaluations   the list
evaluation    one: scores by task, within k attempts, films, invalid episodes, deviations
shot          a screenshot of one's films
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bus.errors import RunDirectoryError, UserError
from dart_cli.evaluation.compare import compare, told
from dart_cli.evaluation.films import Film, films_dir, read_films
from dart_cli.evaluation.results import (
    Evaluation,
    ModeScore,
    TaskScore,
    evaluations_in,
    read_evaluation,
)
from dart_cli.inspection.curves import Series
from dart_cli.view.charts import legend, line_chart
from dart_cli.view.query import Query
from dart_cli.view.run_pages import evaluated_page
from dart_cli.view.screens import action_marks, image_size, screenshot
from dart_cli.view.site import Site, Values
from envs.own_code import did_you_mean

MOST_FILMS = 24
MOST_INVALID = 100
_FAIL_FIRST = {"fail": 0, "invalid": 1, "pass": 2}


def evaluations(run_dir: Path, site: Site, query: Query) -> Values:
    """Each evaluation with its scores, the newest first."""
    rows: list[Values] = []
    for name in reversed(evaluations_in(run_dir)):
        try:
            found = read_evaluation(run_dir, name)
        except RunDirectoryError as error:
            rows.append({"name": name, "fault": str(error)})
            continue
        if found is not None:
            rows.append({"name": name, "fault": "", "found": found, "scores": list(_scores(found))})
    return evaluated_page(run_dir, site, query) | {"rows": rows}


def evaluation(run_dir: Path, site: Site, query: Query, name: str) -> Values:
    """One evaluation, and with `?against=NAME` what differs from that one. Raises UserError."""
    names = evaluations_in(run_dir)
    found = _of(run_dir, names, name)
    against = query.one_of("against", [each for each in names if each != name])
    films = sorted(read_films(run_dir, name), key=lambda film: _FAIL_FIRST[film.outcome])
    invalid = [row for row in found.episodes if row.outcome == "invalid"]
    values = evaluated_page(run_dir, site, query) | {
        "found": found,
        "facts": list(_facts(found)),
        "modes": [_mode(mode, score) for mode, score in found.modes.items()],
        "charts": list(_pass_charts(found)),
        "films": [_film(run_dir, site, name, film) for film in _spread(films, MOST_FILMS)],
        "films_left": max(0, len(films) - MOST_FILMS),
        "invalid": invalid[:MOST_INVALID],
        "invalid_left": max(0, len(invalid) - MOST_INVALID),
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
        compared = [(mode, told(comparison, mode)) for mode in comparison.modes]
        return values | {"comparison": comparison, "compared": compared}
    return values


def shot(run_dir: Path, name: str, file: str) -> bytes:
    """A screenshot of an evaluation's films. Raises UserError for any other file."""
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


def _scores(found: Evaluation) -> Iterator[Values]:
    """A line for each mode, with the compositions."""
    for mode, score in found.modes.items():
        for part, whole in (("", score.overall), (", compositions", score.composed)):
            if whole.episodes or whole.invalid:
                yield {"name": f"{mode}{part}", "score": whole}


def _facts(found: Evaluation) -> Iterator[tuple[str, str]]:
    version = "base weights" if found.policy_version < 0 else f"v{found.policy_version}"
    yield "weights", version
    yield "episodes", f"{found.judged:,}"
    invalid = sum(score.overall.invalid + score.composed.invalid for score in found.modes.values())
    yield "invalid", str(invalid)
    if found.attempts > 1:
        yield "attempts", str(found.attempts)
    yield "protocol", found.protocol.name if found.protocol else "none"
    if found.protocol:
        yield "deviations", str(len(found.protocol.deviations))
    if found.left_out:
        yield "tasks left out", str(len(found.left_out))
    yield "wall time", f"{found.wall_s / 60:.1f} min"


def _mode(mode: str, score: ModeScore) -> Values:
    parts = [
        {"name": name, "rows": rows, "whole": whole, "estimates": estimates}
        for name, rows, whole, estimates in (
            ("all tasks", score.tasks, score.overall, score.pass_at),
            ("all compositions", score.compositions, score.composed, score.composed_pass_at),
        )
        if rows
    ]
    every: list[TaskScore] = [*score.tasks, *score.compositions]
    counts = sorted({k for row in every for k in row.pass_at if k > 1})
    partial = any(row.is_partial for row in every)
    return {"name": mode, "parts": parts, "counts": counts, "partial": partial}


def _pass_charts(found: Evaluation) -> Iterator[Values]:
    """pass@k with its interval and pass^k by k, for each mode and part; none where there was one attempt."""
    for mode, score in found.modes.items():
        for part, estimates in (("", score.pass_at), (", compositions", score.composed_pass_at)):
            if len(estimates) < 2:
                continue
            band = [each.any_interval for each in estimates if each.any_interval is not None]
            series = [
                Series(
                    "pass@k",
                    [(each.k, each.any) for each in estimates],
                    "mean",
                    band if len(band) == len(estimates) else (),
                ),
                Series("pass^k", [(each.k, each.every) for each in estimates], "guess"),
            ]
            label = f"{mode}{part}"
            chart = line_chart(series, width=400, height=220, low=0.0, high=1.0, label=label)
            yield {"name": label, "chart": chart + legend(series)}


def _spread(films: Sequence[Film], most: int) -> list[Film]:
    """At most so many, of as many tasks as possible, in their order."""
    by_task: dict[str, list[Film]] = {}
    for film in films:
        by_task.setdefault(film.task_id, []).append(film)
    turns = max(map(len, by_task.values()), default=0)
    taken = [part[turn] for turn in range(turns) for part in by_task.values() if turn < len(part)]
    return taken[:most]


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
