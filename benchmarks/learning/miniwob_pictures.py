"""Draws the pictures of the study of MiniWoB++, and writes its block of figures into a page of the docs.

draw_pages    success of each page before and after, a PNG
draw_curve    success while training, a PNG
draw_films    one episode before and after of the pages that gained most, a PNG
write_block   puts figures between the markers of a page
figures_of    those figures: pictures, sums, a row for each page beside published results
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.learning.miniwob_pages import (
    HALF,
    HIGH,
    TWELVE,
    pix2act_pages,
    published,
    task_of,
)
from dart_cli.evaluation.films import Film, films_dir, read_films
from dart_cli.evaluation.filmstrip_png import film_strip

GREY, BLUE, GREEN = "#9ca3af", "#2563eb", "#059669"
COLUMNS = 3
BEFORE, AFTER = "before", "after"
LEARNED = ("fail", "pass")
"""Outcomes of a film before and after that is worth showing."""
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NAMES = {
    "rl_only": "without demonstrations",
    "demonstrations": "with demonstrations",
}
"""Bases, as docs name them."""

Summary = Mapping[str, Any]


def draw_pages(path: Path, summary: Summary, title: str) -> None:
    """Draw a row for each trained page, the best first: before in grey, after in colour with its interval."""
    from matplotlib.figure import Figure

    rows = sorted(
        ((page, row) for page, row in summary["pages"].items() if row["trained"]),
        key=lambda each: (-each[1]["after"], -each[1]["before"], each[0]),
    )
    columns = max(1, min(COLUMNS, -(-len(rows) // 12)))
    height = max(1, -(-len(rows) // columns))
    figure = Figure(
        figsize=(max(7.0, 4.4 * columns), 1.1 + 0.19 * max(height, 6)),
        dpi=110,
        layout="constrained",
    )
    axes = figure.subplots(1, columns, sharex=True, squeeze=False)[0]
    for number, axis in enumerate(axes):
        part = rows[number * height : (number + 1) * height]
        for place, (_, row) in enumerate(part):
            before, after = row["before"], row["after"]
            colour = GREEN if after >= HIGH else BLUE
            axis.plot(row["after_interval"], [place, place], color=colour, linewidth=0.8, alpha=0.5)
            axis.plot([before, after], [place, place], color=GREY, linewidth=2.2, alpha=0.6)
            axis.plot(before, place, "o", color="white", markeredgecolor=GREY, markersize=4.5)
            axis.plot(after, place, "o", color=colour, markersize=4.5)
        axis.axvline(HIGH, color=GREY, linewidth=0.7, linestyle=":")
        axis.set_yticks(range(len(part)), [page for page, _ in part], fontsize=7.5)
        axis.set_ylim(height - 0.4, -0.6)
        axis.set_xlim(-0.03, 1.03)
        axis.grid(axis="x", alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    counts = [row["n"] for _, row in rows]
    low, high = min(counts, default=0), max(counts, default=0)
    episodes = f"{low}" if low == high else f"{low} to {high}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(
        f"held-out success: grey before, colour after (green from {HIGH}), 95 % intervals, "
        f"{episodes} episodes a page",
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_curve(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw success while training against trajectories, and the pages at 0.9 and above, for each arm's runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    least, most = 0, 0
    for arm, each in runs.items():
        style = {"color": GREY, "linestyle": "--"} if arm == "flat" else {"color": BLUE}
        for number, run in enumerate(each):
            curve = run["curve"]
            label = {"label": arm if number == 0 else None}
            x = [point["trajectories"] for point in curve]
            left.plot(x, [point["success"] for point in curve], **style, **label)
            right.plot(x, [point["pages_090"] for point in curve], **style, **label)
            ns = [point["n"] for point in curve[len(curve) // 4 :]]
            least, most = min([least or 10**9, *ns]), max([most, *ns])
    left.set_ylabel("success while training, mean over pages")
    left.set_ylim(0, 1.02)
    right.set_ylabel(f"pages at {HIGH} and above")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xlabel(f"trajectories played; a point is {least} to {most} of them")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_films(path: Path, run: Mapping[str, Any], pages: Sequence[str], most: int = 6) -> bool:
    """Return an instance of each page that failed before and passed after, if it was filmed; False for none."""
    folders = [(Path(run["before_dir"]), BEFORE), (Path(run["run_dir"]), AFTER)]
    films = [_by_instance(read_films(folder, name)) for folder, name in folders]
    strips: list[Image.Image] = []
    for page in pages:
        learned = (
            key
            for key, film in films[0].items()
            if key[0] == task_of(page) and (film.outcome, _outcome(films[1], key)) == LEARNED
        )
        if len(strips) == 2 * most or (key := next(learned, None)) is None:
            continue
        for (folder, name), films_of_run in zip(folders, films, strict=True):
            film = films_of_run[key]
            heading = page if name == BEFORE else ""
            strips.append(
                film_strip(films_dir(folder, name), film, name, heading, most=5, width=150)
            )
    if not strips:
        return False
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
    return True


def _outcome(films: Mapping[tuple[str, int], Film], key: tuple[str, int]) -> str:
    return films[key].outcome if key in films else ""


def _by_instance(films: Sequence[Film]) -> dict[tuple[str, int], Film]:
    return {(film.task_id, film.seed): film for film in films}


def gained_most(summary: Summary) -> list[str]:
    """Return the trained pages in order of their gain in success, the largest first."""
    rows = [(page, row) for page, row in summary["pages"].items() if row["trained"]]
    return [page for page, row in sorted(rows, key=lambda row: row[1]["before"] - row[1]["after"])]


# --- the page ---------------------------------------------------------------------------------


def write_block(page: Path, block: str) -> None:
    """Put a block between the markers of a page. Raises ValueError where it has none."""
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n{block.strip()}\n{END}{tail}", encoding="utf-8")


def figures_of(results: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Return the block: the picture first; `pictures` are by name, relative to the page."""
    bases = [name for name in NAMES if name in results]
    lines = []
    for name in ("pages", "curve", "films"):
        if name in pictures:
            lines += [f"![{_ALT[name]}]({pictures[name]})", ""]
        if name == "pages":
            lines += _sums(results, bases)
    if "twelve" in results:
        lines += _twelve(results["twelve"])
    lines += _means(results, bases)
    lines += _by_page(results, bases)
    return "\n".join(lines)


_ALT = {
    "pages": "Success of each page before and after reinforcement learning",
    "curve": "Success while training, mean over pages",
    "films": "Episodes before and after",
}

_SUMS = {
    "pages trained on": "pages_trained",
    "pages at 0.9 and above, before": "pages_090_before",
    "pages at 0.9 and above, after": "pages_090_after",
    "of which below 0.5 before": "learned_from_below_half",
    "pages at 0.5 and above, before": "pages_050_before",
    "pages at 0.5 and above, after": "pages_050_after",
    "mean success, before": "mean_before",
    "mean success, after": "mean_after",
    "mean over Pix2Act's pages, after": "mean_pix2act_pages",
    "the same, partial rewards counted": "mean_reward_pix2act_pages",
    "trajectories": "trajectories",
    "CPU seconds of training, browsers included": "cpu_seconds",
}


def _sums(results: Mapping[str, Any], bases: Sequence[str]) -> list[str]:
    if not bases:
        return []
    rows = [["held-out seeds, sampled", *(f"a base {NAMES[base]}" for base in bases)]]
    rows += [
        [title, *(_number(results[base].get(key)) for base in bases)]
        for title, key in _SUMS.items()
    ]
    return _table(rows)


def _twelve(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for base, arms in results.items():
        names = list(arms)
        rows = [["page", "kind", "before", *(f"after, arm {arm}" for arm in names)]]
        for page, kind in TWELVE.items():
            parts = [arms[arm]["pages"].get(page) for arm in names]
            if all(parts):
                after = [_success(part, "after") for part in parts]
                rows.append([page, kind, _success(parts[0], "before"), *after])
        means = [_number(arms[arm]["mean_after"]) for arm in names]
        rows.append(["**mean**", "", _number(arms[names[0]]["mean_before"]), *means])
        seeds = len(arms[names[0]]["seeds"])
        note = " (`flat`: at rate 0)" if "flat" in names else ""
        lines += [
            f"Twelve pages, a base {NAMES.get(base, base)}, {seeds} seed{'s' * (seeds != 1)}{note}:",
            "",
            *_table(rows),
        ]
    return lines


def _means(results: Mapping[str, Any], bases: Sequence[str]) -> list[str]:
    """Return the means that others have published, below ours over the pages of Pix2Act's table."""
    rows = [["agent", "sees", "mean success", "pages", "demonstrations", "parameters", "read in"]]
    rows += [
        [
            f"ours, {NAMES[base]}",
            "pixels",
            _number(results[base]["mean_pix2act_pages"]),
            f"{results[base]['pix2act_pages']} of Pix2Act's",
            "",
            "",
            "",
        ]
        for base in bases
    ]
    rows += [
        [
            agent["agent"],
            agent["sees"],
            f"{agent['success']:.2f}",
            str(agent["pages"]),
            _number(agent.get("demonstrations")),
            _number(agent.get("parameters")),
            agent.get("source") or f"{agent['second_hand']} (second hand)",
        ]
        for agent in published()["means"]
    ]
    return _table(rows)


def _by_page(results: Mapping[str, Any], bases: Sequence[str]) -> list[str]:
    """Return a row for each page that passes half of its episodes, before or after; all pages are in the result file."""
    if not bases:
        return []
    shared, others = set(pix2act_pages()), _published_columns()
    pages = dict.fromkeys(page for base in bases for page in results[base]["pages"])
    heads = [f"{side}, {NAMES[base]}" for base in bases for side in ("before", "after")]
    rows = [["page", *heads, "trajectories", "in Pix2Act's table", *others]]
    for page in sorted(pages):
        parts = [results[base]["pages"].get(page) for base in bases]
        if max(part[side] for part in parts if part for side in ("before", "after")) < HALF:
            continue
        cells = [_success(part, side) for part in parts for side in ("before", "after")]
        episodes = " / ".join(str(part["episodes"]) if part else "-" for part in parts)
        numbers = [_number(column.get(page)) for column in others.values()]
        rows.append([page, *cells, episodes, "yes" if page in shared else "", *numbers])
    return _table(rows)


def _published_columns() -> dict[str, Mapping[str, float]]:
    """Return title -> page -> score of the published columns whose scores by page are in the file."""
    return {
        column["title"]: column["scores"]
        for column in published().get("by_page", {}).values()
        if column.get("scores")
    }


def _success(part: Mapping[str, Any] | None, side: str) -> str:
    if not part:
        return "-"
    low, high = part[f"{side}_interval"]
    return f"{part[side]:.2f} [{low:.2f}, {high:.2f}]"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) and value <= 1 else f"{value:,.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|" + "---|" * len(rows[0]), *body, ""]
