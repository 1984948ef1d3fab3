"""Teach the tiny model to point in pages of MiniWoB++: single steps of the oracle, nothing else.

    .venv/bin/python scripts/build_miniwob_base.py --out runs/miniwob-base

Screens come from the real browser, at training seeds, after some random presses. Each is one sheet
of questions (scripts/build_tiny_base.py):

- the page's own instruction, where one step answers it: the box that the oracle presses;
- "click ONE", "click red": whatever is in sight and has a name of its own there;
- the page's own instruction, where it takes several steps: any widget in sight, at random. What
  leads where is not shown; that is for reinforcement learning to find.

The printed hit rate is on seeds held out.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_tiny_base import BLANK, Question, Sheet, cover, evaluate, train

from bus.errors import EnvError
from dart_cli.policy.images import ImagePreparer
from dart_cli.policy.model import load_policy
from envs.actions import Click
from envs.miniwob.env import MiniwobEnv
from envs.miniwob.oracle import PageWidget
from envs.miniwob.tasks import FIRST_TEST_SEED
from envs.registry import make_env
from scripts import tiny_model as tiny

Box = tuple[float, float, float, float]

SINGLE = (
    "click-test",
    "click-test-2",
    "click-color",
    "click-dialog",
    "click-dialog-2",
    "click-tab",
    "focus-text",
    "focus-text-2",
    "grid-coordinate",
)
"""Pages of one step: what the oracle presses is the answer to their instruction."""

SEVERAL = ("click-collapsible", "tic-tac-toe")
"""Pages of several steps, whose instruction is never answered."""

READ = ("click-test-2",)
"""Pages that differ by a word alone, which takes longer to learn: shown four times as often."""

WANDER = 4
"""Most random presses before a screen of a page of several steps is taken."""

NAMED = 3
"""Most questions on one sheet about what is in sight."""


@dataclass(frozen=True)
class PageScreen:
    """One screenshot of a page, and what can be asked about it."""

    key: str
    png: bytes
    instruction: str
    goal: Box | None  # what answers the instruction; None on pages of several steps
    widgets: tuple[tuple[str, str, Box], ...]  # role, label, box in shares of the screen
    page: str


def gather(env: MiniwobEnv, page: str, seeds: Sequence[int], rng: Random) -> Iterator[PageScreen]:
    """Screens of a page, one for each seed."""
    for seed in seeds:
        seen, info = env.reset(seed=seed, options={"task": f"miniwob/{page}"})
        over = False
        if page in SEVERAL:
            for _ in range(rng.randrange(WANDER + 1)):
                x, y = _middle(rng.choice(env.widgets()).box)
                later, _, over, _, _ = env.step(Click(x=round(x), y=round(y)))
                if over:
                    break
                seen = later
        if over:
            continue

        def share(box: Box, size: tuple[int, int] = (seen.width, seen.height)) -> Box:
            (left, top, right, bottom), (width, height) = box, size
            return (
                max(0.0, left / width),
                max(0.0, top / height),
                min(1.0, right / width),
                min(1.0, bottom / height),
            )

        widgets = env.widgets()
        goal = None
        if page in SINGLE:
            try:
                press = env.oracle_action()
            except EnvError:  # wholly covered: this instance has no solution
                continue
            assert isinstance(press, Click), f"{page}: the oracle does not press but {press}"
            pressed = [each.box for each in widgets if _holds(each.box, press)]
            if not pressed:  # its middle is covered
                continue
            goal = share(pressed[-1])
        yield PageScreen(
            f"{page}/{seed}",
            seen.screenshot,
            info["instruction"],
            goal,
            tuple((each.role, _spoken(each), share(each.box)) for each in widgets),
            page,
        )


def sheet(preparer: ImagePreparer, screen: PageScreen, rng: Random) -> Sheet:
    """The questions of one screen, those about what is in sight drawn at random."""
    goal = screen.goal or rng.choice(screen.widgets)[2]
    questions = [Question(screen.instruction, "click({})", (goal,), screen.page)]
    count = Counter(label for _, label, _ in screen.widgets)
    named = [(label, box) for _, label, box in screen.widgets if label and count[label] == 1]
    for label, box in rng.sample(named, min(NAMED, len(named))):
        questions.append(Question(f"click {label}", "click({})", (box,), "named"))
    with Image.open(io.BytesIO(screen.png)) as picture:
        image = preparer.of_image(screen.key, picture)
    columns = image.grid[2] // preparer.merge
    rows = image.tokens // columns
    return Sheet(image, questions, name_cells(screen.widgets, rows, columns))


def name_cells(widgets: Sequence[tuple[str, str, Box]], rows: int, columns: int) -> list[str]:
    """One word for each image token, row by row: what covers at least a third of its cell."""
    names = [BLANK] * (rows * columns)
    for role, label, box in widgets:
        left, top, right, bottom = box
        area = (right - left) * (bottom - top) * rows * columns  # in cells
        colour = label in tiny.WORDS and role in ("div", "span")
        for at, part in enumerate(cover(box, rows, columns)):
            if part * area > 1 / 3 or part > 1 / 2:
                names[at] = label if colour else ROLES.get(role, "box")
    return names


ROLES: Mapping[str, str] = {
    "button": "button",
    "input": "text",
    "a": "link",
    "h3": "bar",
    "circle": "circle",
    "span": "tile",
}
"""HTML element -> the word for it."""


def _spoken(widget: PageWidget) -> str:
    return widget.label if len(widget.label) <= 10 else ""


def _middle(box: Box) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _holds(box: Box, press: Click) -> bool:
    return box[0] <= press.x <= box[2] and box[1] <= press.y <= box[3]


def main() -> None:
    """Build one checkpoint and say how good it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--screens", type=int, default=300, help="of each page")
    parser.add_argument("--seconds", type=float, default=500.0, help="CPU seconds of training")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=24, help="screens an update")
    parser.add_argument("--scale", type=float, default=1.0, help="pixels of a CSS pixel")
    parser.add_argument("--start", default="builtin:tiny", help="the folder to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    policy = load_policy(arguments.start)
    rng = Random(f"miniwob/{arguments.seed}")
    env = make_env("miniwob", scale=arguments.scale)
    assert isinstance(env, MiniwobEnv)
    started = time.monotonic()
    screens, heldout = [], []
    for page in (*SINGLE, *SEVERAL):
        screens += list(gather(env, page, range(arguments.screens), rng))
        tests = range(FIRST_TEST_SEED, FIRST_TEST_SEED + 30)
        heldout += list(gather(env, page, tests, rng)) if page in SINGLE else []
    env.close()
    print(f"{len(screens)} screens in {time.monotonic() - started:.0f} s", flush=True)
    often = [4 if screen.page in READ else 1 for screen in screens]
    rng.shuffle(heldout)
    test = [sheet(policy.images, screen, rng) for screen in heldout]
    for line in train(
        policy,
        lambda rng, _: sheet(policy.images, rng.choices(screens, often)[0], rng),
        test,
        seed=arguments.seed,
        seconds=arguments.seconds,
        rate=arguments.rate,
        batch=arguments.batch,
    ):
        print(line, flush=True)
    build = {
        "script": "scripts/build_miniwob_base.py",
        "start": arguments.start,
        "seed": arguments.seed,
        "screens": len(screens),
        "cpu_seconds": arguments.seconds,
        "rate": arguments.rate,
        "batch": arguments.batch,
        "heldout_hit_rate": {
            kind: round(value, 4) for kind, value in sorted(evaluate(policy, test).items())
        },
    }
    tiny.save(
        arguments.out,
        policy.model,  # type: ignore[arg-type]
        policy.tokenizer,
        policy.images.processor,
        build,
    )
    print(json.dumps(build))


if __name__ == "__main__":
    main()
