"""The pages of the embedded suites are true: their tables are generated, their example runs."""

from __future__ import annotations

import re
from pathlib import Path

from envs.contract.registry import load_suite, make_env
from envs.suites.embedded.env import EmbeddedEnv
from scripts.embedded_gallery import PAGES, SUITES, sheet, with_tables

PAGE = Path(__file__).parents[4] / "docs" / "environments" / "embedded.md"


def test_the_tables_are_those_of_the_suites() -> None:
    """Fix with `python scripts/embedded_gallery.py docs`."""
    texts = [(PAGE.parents[1] / page).read_text() for page in PAGES]
    assert [with_tables(text) for text in texts] == texts
    text = "".join(texts)
    for suite in SUITES:
        for task in suite.tasks:
            assert f"`{task}`" in text


def test_a_sheet_shows_each_task_in_its_place() -> None:
    picture = sheet(SUITES[0], 2, ["click", "menu", "page"])
    assert picture.size == (2 * 168 + 8, 2 * 168 + 8)


def test_the_scene_of_the_page_is_played_by_its_own_solution(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    example = next(block for block in blocks if "class KnockScene" in block)
    file = tmp_path / "door.py"
    file.write_text(example)
    name = f"{file}:DoorSuite"
    env = make_env(name, size="336x252")
    assert isinstance(env, EmbeddedEnv)
    for seed in range(5):
        _, info = env.reset(seed=seed, options={"task": load_suite(name).tasks["door/knock"]})
        for _ in range(info["need"]):
            _, reward, terminated, _, _ = env.step(env.oracle_action())
        assert (reward, terminated) == (1.0, True)
