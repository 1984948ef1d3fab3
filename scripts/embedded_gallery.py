"""Tables of templates and pictures of the embedded suites, for the documentation.

`python scripts/embedded_gallery.py docs` writes both anew: the tables into the pages of `PAGES`, between their
markers, and one contact sheet per suite into docs/images.
"""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs.contract.actions import Done
from envs.suites.embedded.env import EmbeddedEnv
from envs.suites.embedded.suites import AppsSuite, DeskSuite, MiniSuite

EmbeddedSuite = MiniSuite | DeskSuite | AppsSuite
SUITES: tuple[EmbeddedSuite, ...] = (MiniSuite(), DeskSuite(), AppsSuite())
PAGES = ("environments/embedded.md", "environments/apps.md")
GAP = 8  # pixels between the pictures of a sheet
PAPER = (255, 255, 255)


def table(suite: EmbeddedSuite) -> str:
    """Return the suite's templates as a Markdown table; examples are of seed 0."""
    env = suite.make_env()
    lines = ["| task | steps | split | what it is | example |", "|---|---|---|---|---|"]
    for task_id, task in suite.tasks.items():
        _, info = env.reset(seed=0, options={"task": task_id})
        what = _what(suite, task_id)
        lines.append(
            f"| `{task_id}` | {task.tier} | {task.split} | {what} | {info['instruction']} |"
        )
    return "\n".join(lines)


def sheet(suite: EmbeddedSuite, columns: int, task_ids: list[str]) -> Image.Image:
    """Return a picture of each task, halfway through its solution."""
    env = suite.make_env()
    pictures = [
        _halfway(env, f"{suite.name}/{task_id}", seed) for seed, task_id in enumerate(task_ids)
    ]
    width, height = suite.size
    rows = -(-len(pictures) // columns)
    size = (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP)
    paper = Image.new("RGB", size, PAPER)
    for i, picture in enumerate(pictures):
        paper.paste(picture, (i % columns * (width + GAP), i // columns * (height + GAP)))
    return paper


def with_tables(text: str) -> str:
    """Return the document with the table of each suite put between its markers."""
    for suite in SUITES:
        begin, end = f"<!-- table {suite.name} -->\n", f"<!-- end {suite.name} -->"
        if begin not in text:
            continue
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{table(suite)}\n{end}{after}"
    return text


def _what(suite: EmbeddedSuite, task_id: str) -> str:
    """Return the first sentence of the scene's docstring, and what is laid over it."""
    scene = suite.scenes[task_id]
    over = scene.keywords if isinstance(scene, partial) else {}
    made_by = scene.func if isinstance(scene, partial) else scene
    text = (made_by.__doc__ or "").split("\n")[0].rstrip(".")
    return (
        text
        + (", behind a pop-up" if over.get("popup") else "")
        + (", to be confirmed" if over.get("confirm") else "")
    )


def _halfway(env: EmbeddedEnv, task_id: str, seed: int) -> Image.Image:
    observation, info = env.reset(seed=seed, options={"task": task_id})
    for _ in range(info["need"] // 2):
        action = env.oracle_action()
        if isinstance(action, Done):
            break
        observation, *_ = env.step(action)
    return Image.open(io.BytesIO(observation.screenshot)).convert("RGB")


def write(docs: Path) -> None:
    """Write tables and pictures into the folder `docs`."""
    for name in PAGES:
        page = docs / name
        page.write_text(with_tables(page.read_text("utf-8")), encoding="utf-8")
    images = docs / "images"
    images.mkdir(exist_ok=True)
    mini = "popup menu page confirm tabs dropdown form scroll folder delete".split()
    desk = "settings-choice sign-up files-rename menu list calculator".split()
    apps = "mail-reply mail-setting shop-order shop-wish centre-role centre-forget".split()
    for suite, columns, task_ids in (
        (SUITES[0], 5, mini),
        (SUITES[1], 3, desk),
        (SUITES[2], 3, apps),
    ):
        picture = sheet(suite, columns, task_ids).quantize(256, dither=Image.Dither.NONE)
        picture.save(images / f"{suite.name}.png", optimize=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
