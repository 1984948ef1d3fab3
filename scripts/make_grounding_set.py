"""Draw a grounding set from our own environments, in ScreenSpot's format; nothing is fetched.

    .venv/bin/python scripts/make_grounding_set.py --out sets/made
    .venv/bin/python scripts/make_grounding_set.py --out sets/made --envs mini,desk --items 300
    dart eval grounding sets/made/test --model builtin:tiny

OUT/test has seeds that training never sees, OUT/test_application applications, OUT/test_layout sizes of the
screen; with --train N there is OUT/train, too. Environments whose programs are not installed are left out
with a line that says so, unless --envs names them.

Each split is a folder of ScreenSpot's layout, whose rows have keys of ours: `environment`, `application`,
`size`, and `screen_id` (suite, task, seed, steps and size, which lead to the same screen again). The same arguments
give the same set; SOURCES are the environments that know the boxes of their widgets.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bus.errors import DartError, EnvError, UserError
from dart_cli.explore.rows import Target, clear, row_of
from dart_cli.runtime.tables import progress
from envs.contract.base import GuiEnv, Observation, Solvable, Task
from envs.contract.blobs import content_hash, image_suffix
from envs.contract.registry import load_suite, make_env
from envs.suites.embedded.scene import phrases

Split = Literal["train", "test", "test_application", "test_layout"]

SPLITS: Mapping[Split, str] = {
    "train": "for training",
    "test": "seeds that training never saw",
    "test_application": "applications that training never saw",
    "test_layout": "sizes of the screen that training never saw",
}

TEST_SEEDS = 1_000_000
"""Seeds from here on are never trained on, in this set as everywhere."""

SEEDS = 10_000
"""Seeds of a task between those of two sets."""

PER_SCREEN = 3
"""Targets of one screen, at most."""

HELD_OUT = 5
"""One application of so many is in `test_application` alone."""


@dataclass(frozen=True)
class Source:
    """One suite: its screens, and what can be asked about them."""

    suite: str
    group: str  # ScreenSpot's: desktop, mobile, web
    sizes: tuple[dict[str, Any], ...]  # options of make_env: those that are trained on
    other_sizes: tuple[dict[str, Any], ...]  # those of test_layout
    targets: Callable[[Any], list[Target]]  # of the environment's present screen
    application: Callable[[Task], str]
    walk: int = 3  # steps of the solution before a screen is taken, at most
    options: Mapping[str, Any] = field(default_factory=dict)


# --- what can be asked -----------------------------------------------------------------------

_DESK_WORDS = {
    "button": 'click the "{}" button',
    "checkbox": 'click the "{}" check box',
    "radio": 'choose "{}"',
    "toggle": 'click the "{}" switch',
    "tab": 'open the "{}" tab',
    "menu": 'open the "{}" menu',
    "option": 'choose "{}" from the list',
    "item": 'click "{}"',
    "row": 'select the row "{}"',
    "field": 'click the "{}" field',
    "combo": 'open the "{}" list',
    "slider": 'click the "{}" slider',
}


def _mini_targets(env: Any) -> list[Target]:
    """Return the widgets without letters: a colour, a shape or an icon names them."""
    return [
        Target(phrase, tuple(widget.bbox), has_text=False)
        for widget in env.widgets()
        for phrase in phrases(widget.role, widget.name, widget.colour)[:1]
    ]


def _desk_targets(env: Any) -> list[Target]:
    """Return the widgets by the text on them or beside them, icons by what they show."""
    targets = []
    for widget in env.widgets():
        beside = widget.name if widget.name[:1].isupper() and "." not in widget.name else ""
        text = beside if widget.role == "combo" else widget.label or beside
        if widget.role in _DESK_WORDS and text:
            instruction = _DESK_WORDS[widget.role].format(text)
        else:
            instruction = next(iter(phrases(widget.role, widget.name, widget.colour)), "")
        if instruction:
            targets.append(Target(instruction, tuple(widget.bbox), has_text=bool(widget.label)))
    return targets


_SHAPES = ("circle", "rect", "polygon", "span")
"""Elements of a page whose label is their colour; a span of a page has a data-color."""


def _page_targets(env: Any) -> list[Target]:
    """Return the elements of a page by their text or colour."""
    return [
        Target(f"click {widget.label}", widget.box, has_text=widget.role not in _SHAPES)
        for widget in env.widgets()
        if widget.label and len(widget.label) <= 60
    ]


_ROLES = {
    "push button": 'click "{}"',
    "toggle button": 'click "{}"',
    "check box": 'click the check box "{}"',
    "radio button": 'choose "{}"',
    "menu": 'open the menu "{}"',
    "menu item": 'click "{}" in the menu',
    "check menu item": 'click "{}" in the menu',
    "page tab": 'open the tab "{}"',
    "combo box": 'open the list "{}"',
}
_WITH_TEXT = ("check box", "radio button", "menu", "menu item", "check menu item", "page tab")


def _desktop_targets(env: Any) -> list[Target]:
    """Return the widgets as applications report them to a screen reader.

    They do not report whether a button shows a text: one that is hardly wider than high is an icon.
    """
    from envs.suites.desktop.accessibility import read_widgets

    targets = []
    for widget in read_widgets(env.desktop):
        name, box = (widget["name"] or "").strip(), widget["box"]
        if widget["role"] not in _ROLES or not name or not box:
            continue
        if not (widget["showing"] and widget["sensitive"]):
            continue
        x, y, width, height = box
        text = widget["role"] in _WITH_TEXT or width > 1.5 * height
        instruction = _ROLES[widget["role"]].format(name)
        targets.append(Target(instruction, (x, y, x + width, y + height), has_text=text))
    return targets


def _mini_application(task: Task) -> str:
    """Return the kind of window, whatever comes before or after it."""
    parts = task.id.partition("/")[2].split("+")
    return next((part for part in parts if part not in ("popup", "confirm")), "click")


def _desk_application(task: Task) -> str:
    """Return what the task is played in: files and settings have several tasks."""
    kind = task.id.partition("/")[2]
    family = kind.partition("-")[0]
    return family if family in ("files", "settings") else kind


def _sizes(*texts: str) -> tuple[dict[str, Any], ...]:
    return tuple({"size": text} for text in texts)


SOURCES: Mapping[str, Source] = {
    "mini": Source(
        "mini",
        "desktop",
        _sizes("168x168"),
        _sizes("252x252", "224x168", "168x252"),
        _mini_targets,
        _mini_application,
    ),
    "desk": Source(
        "desk",
        "desktop",
        _sizes("448x336"),
        _sizes("640x480", "640x360", "480x600"),
        _desk_targets,
        _desk_application,
    ),
    "miniwob": Source(
        "miniwob",
        "web",
        ({"scale": 1.0},),
        ({"scale": 1.5}, {"scale": 3.0}),
        _page_targets,
        lambda task: task.id.partition("/")[2],
        walk=1,
    ),
    "desktop": Source(
        "desktop",
        "desktop",
        _sizes("1280x720"),
        _sizes("1024x768", "1600x900"),
        _desktop_targets,
        lambda task: str(task.params["application"]),
        walk=2,
        options={"observe": ("accessibility",)},
    ),
}
"""By the name of the suite."""


# --- making ----------------------------------------------------------------------------------


def make_set(
    out: Path,
    environments: Sequence[str],
    counts: Mapping[Split, int],
    *,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `counts[split]` rows of each environment into OUT/SPLIT; return a description by split.

    Raises UserError for a folder with something in it or an unknown environment, MissingPartError where a
    program of an environment is not installed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists; name a folder that is not there yet")
    for name in environments:
        if name not in SOURCES:
            raise UserError(f"no environment {name!r} here; there are {', '.join(SOURCES)}")
        suite: Any = load_suite(name)
        if hasattr(suite, "check_parts"):
            suite.check_parts(**SOURCES[name].options)
    description: dict[str, Any] = {"seed": seed, "splits": {}}
    for split, count in counts.items():
        if not count:
            continue
        rows: dict[str, list[dict[str, Any]]] = {}
        images = out / split / "screenspot_imgs"
        images.mkdir(parents=True)
        for name in environments:
            source = SOURCES[name]
            source_rows = _rows(source, split, count, images, seed, advance, say)
            rows.setdefault(source.group, []).extend(source_rows)
        for group, listed in rows.items():
            path = out / split / f"screenspot_{group}.json"
            path.write_text(json.dumps(listed, indent=1), encoding="utf-8")
        every = [row for listed in rows.values() for row in listed]
        description["splits"][split] = {
            "holds": SPLITS[split],
            "rows": len(every),
            "environments": dict(Counter(row["environment"] for row in every)),
            "applications": sorted({f"{row['environment']}/{row['application']}" for row in every}),
        }
    (out / "set.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
    return description


def held_out(source: Source) -> set[str]:
    """Return the applications that are in `test_application` alone."""
    names = sorted({source.application(task) for task in load_suite(source.suite).tasks.values()})
    count = max(1, len(names) // HELD_OUT) if len(names) > 1 else 0
    return set(Random(f"{source.suite}/applications").sample(names, count))


def _rows(
    source: Source,
    split: Split,
    count: int,
    images: Path,
    seed: int,
    advance: Callable[[int], None],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    apart = held_out(source)
    tasks = [
        task
        for task in load_suite(source.suite).tasks.values()
        if (source.application(task) in apart) == (split == "test_application")
    ]
    sizes = source.other_sizes if split == "test_layout" else source.sizes
    rng = Random(f"{source.suite}/{split}/{seed}")
    rng.shuffle(tasks)  # a small set has some of all
    first = (0 if split == "train" else TEST_SEEDS) + seed * SEEDS % TEST_SEEDS
    rows: list[dict[str, Any]] = []
    pairs: set[tuple[str, str]] = set()
    counts: Counter[str] = Counter()
    envs = [make_env(source.suite, **source.options, **size) for size in sizes]
    # Enough for any count where every screen gives one row; a suite without targets ends.
    most = 20 * count + 10 * len(tasks)
    try:
        for nth in range(most):
            if len(rows) >= count:
                break
            task = tasks[nth % len(tasks)]
            place = first + nth // len(tasks)
            env = envs[(nth + place) % len(envs)]  # each task in each size
            try:
                screen = _screen(env, task, place, rng.randrange(source.walk + 1))
                targets = [] if screen is None else clear(source.targets(env), *_size(screen[0]))
            except EnvError as error:
                say(f"{task.id} seed {place}: left out: {error}")
                continue
            if screen is None:
                continue
            shot, steps = screen
            name = f"{content_hash(shot.screenshot)}.{image_suffix(shot.screenshot)}"
            # Those asked least so far, so that no instruction is much commoner than the others.
            rarest = sorted(
                rng.sample(targets, len(targets)), key=lambda each: counts[each.instruction]
            )
            next_targets = rarest[: min(PER_SCREEN, count - len(rows))]
            fresh = [target for target in next_targets if (name, target.instruction) not in pairs]
            for target in fresh:
                pairs.add((name, target.instruction))
                counts[target.instruction] += 1
                screen_id = f"{task.id}/{place}/{steps}/{shot.width}x{shot.height}"
                rows.append(
                    row_of(
                        target, name, source.suite, source.application(task), _size(shot), screen_id
                    )
                )
            if fresh:
                (images / name).write_bytes(shot.screenshot)
                advance(len(fresh))
    finally:
        for env in envs:
            env.close()
    if len(rows) < count:
        say(f"{source.suite}: {len(rows)} rows of {split} in place of {count}: no more were found")
    return rows


def _screen(env: GuiEnv, task: Task, seed: int, steps: int) -> tuple[Observation, int] | None:
    """Return the screen of a task after so many steps of its solution, and how many were made."""
    shot, _ = env.reset(seed=seed, options={"task": task})
    for steps_taken in range(steps):
        if not isinstance(env, Solvable):
            return shot, steps_taken
        try:
            later, _, is_over, cut, _ = env.step(env.oracle_action())
        except EnvError:  # no solution, or none from here
            return (shot, steps_taken) if steps_taken == 0 else None
        if is_over or cut:  # the screen before was still to be acted on, but it is gone
            return None
        shot = later
    return shot, steps


def _size(shot: Observation) -> tuple[int, int]:
    return shot.width, shot.height


def available(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each environment with the reason why it cannot be played here; empty where it can."""
    for name in names:
        suite: Any = load_suite(name)
        try:
            if hasattr(suite, "check_parts"):
                suite.check_parts(**SOURCES[name].options)
        except UserError as error:
            yield name, str(error)
        else:
            yield name, ""


def main() -> int:
    """Read the options, make the set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument(
        "--envs", default="", help=f"some of {','.join(SOURCES)}; default those that run here"
    )
    parser.add_argument(
        "--items", type=int, default=200, help="rows of each test split and environment"
    )
    parser.add_argument("--train", type=int, default=0, help="rows of the training split, likewise")
    parser.add_argument("--seed", type=int, default=0, help="another set")
    options = parser.parse_args()
    names = [name.strip() for name in options.envs.split(",") if name.strip()]
    try:
        if not names:
            for name, problem in available(list(SOURCES)):
                if problem:
                    sys.stderr.write(f"without {name}: {problem}\n")
                else:
                    names.append(name)
        counts: dict[Split, int] = {
            "train": options.train,
            "test": options.items,
            "test_application": options.items,
            "test_layout": options.items,
        }
        with progress("drawing", sum(counts.values()) * len(names), "rows") as advance:
            description = make_set(
                options.out,
                names,
                counts,
                seed=options.seed,
                advance=advance,
                say=lambda line: print(line, file=sys.stderr),
            )
    except DartError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print(json.dumps({name: each["rows"] for name, each in description["splits"].items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
