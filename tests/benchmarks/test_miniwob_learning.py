"""The study of MiniWoB++: its pages, its figures, its curve, and CPU seconds that outlive a stop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.learning.miniwob_browsergym import PAGES
from benchmarks.learning.miniwob_learning import gather
from benchmarks.learning.miniwob_pages import (
    TWELVE,
    pix2act_pages,
    published,
    summary_of,
    task_of,
)
from benchmarks.learning.miniwob_pictures import BEGIN, END, draw_pages, figures_of, write_block
from benchmarks.learning.miniwob_study import Study, curve_of, metered
from benchmarks.learning.study import Cell, Result
from dart_cli.config.load import load_config
from dart_cli.runtime.supervisor import ChildError
from envs.suites.miniwob.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "miniwob.toml"


def run(seed: int, **pages: tuple[int, int]) -> Result:
    """A run with what passed of ten episodes before and after."""
    return {
        "pages": {
            page.replace("_", "-"): {
                "before": [before, 10],
                "after": [after, 10],
                "reward_after": after / 10,
                "played": 100,
                "trained": page != "click_checkboxes_soft",
            }
            for page, (before, after) in pages.items()
        },
        "cpu_s": {"before": 1.0, "train": 60.0, "after": 2.0},
        "minutes": 1.0,
        "trajectories": 100 * len(pages),
        "updates": 7,
        "curve": curve_of([("click-tab", True), ("click-tab", False)]),
        "model": "builtin:tiny",
        "seed": seed,
    }


def test_chosen_and_published_pages_are_tasks_of_the_suite() -> None:
    chosen = [*TWELVE, *PAGES, *pix2act_pages()]
    assert [page for page in chosen if task_of(page) not in TASKS] == []
    assert (len(TWELVE), len(set(PAGES)), len(pix2act_pages())) == (12, 20, 58)


def test_every_published_figure_names_where_it_was_read() -> None:
    tables = [*published()["means"], *published().get("by_page", {}).values()]
    assert tables
    assert [each for each in tables if not (each.get("source") or each.get("second_hand"))] == []


def test_pages_that_are_only_evaluated_count_for_the_published_mean_alone() -> None:
    runs = [
        run(0, click_tab=(2, 9), enter_text=(9, 9), click_checkboxes_soft=(0, 0)),
        run(1, click_tab=(2, 10), enter_text=(10, 10), click_checkboxes_soft=(0, 0)),
    ]
    found = summary_of(runs)
    assert found["pages"]["click-tab"]["after"] == 0.95
    assert found["pages"]["click-tab"]["n"] == 20
    assert found["pages"]["click-tab"]["episodes"] == 200
    assert (found["pages_trained"], found["pages_090_before"], found["pages_090_after"]) == (
        2,
        1,
        2,
    )
    assert found["learned_from_below_half"] == 1
    assert found["mean_after"] == 0.95
    assert (found["mean_pix2act_pages"], found["pix2act_pages"]) == (0.475, 2)  # no enter-text
    assert found["cpu_seconds"] == 120


def test_a_page_that_is_played_often_counts_no_more_than_another() -> None:
    judged = [("often", True)] * 30 + [("seldom", False)]
    last = curve_of(judged)[-1]
    assert (last["success"], last["pages"], last["n"], last["trajectories"]) == (0.5, 2, 31, 31)


@pytest.mark.parametrize("arm", ["rl", "flat"])
def test_arms_are_valid_configurations(arm: str, tmp_path: Path) -> None:
    study = Study(ROOT, CONFIG, tmp_path, "builtin:miniwob", hours=2.0, pages=tuple(TWELVE))
    config = load_config(CONFIG, study.sets_of(Cell(arm, 3)))
    assert config.env.tasks == [task_of(page) for page in TWELVE]
    assert (config.train.lr == 0, config.train.max_minutes) == (
        (True, 12) if arm == "flat" else (False, 120)
    )
    assert set(study.evaluated()) == set(TWELVE)


def test_figures_of_parts_are_gathered_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    gather(path, ("rl_only",), {"a": 1})
    gather(path, ("twelve", "rl_only"), {"rl": {}})
    gather(path, ("rl_only",), {"a": 2})
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told == {"benchmark": "miniwob", "rl_only": {"a": 2}, "twelve": {"rl_only": {"rl": {}}}}


def test_the_block_of_a_page_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n\n{BEGIN}\nold\n{END}\n\ntail\n", encoding="utf-8")
    summary = summary_of([run(0, click_tab=(2, 9), enter_text=(9, 10))])
    write_block(page, figures_of({"rl_only": summary}, {"pages": "images/x.png"}))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Head\n\n{BEGIN}\n![")
    assert text.endswith(f"{END}\n\ntail\n")
    assert "| click-tab | 0.20 [0.06, 0.51] | 0.90 [0.60, 0.98] | 100 |" in text
    assert "old" not in text
    with pytest.raises(ValueError, match="has no"):
        write_block(ROOT / "pyproject.toml", "")


def test_the_picture_has_a_row_for_each_page(tmp_path: Path) -> None:
    path = tmp_path / "pages.png"
    draw_pages(path, summary_of([run(0, click_tab=(2, 9), enter_text=(9, 10))]), "two pages")
    assert path.stat().st_size > 5_000


def test_cpu_seconds_add_up_over_starts(tmp_path: Path) -> None:
    study = Study(ROOT, CONFIG, tmp_path, "builtin:tiny", hours=1.0)
    burn = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    for _ in range(2):
        metered([sys.executable, "-c", f"{burn}\ntime.sleep(1.5)"], study, "rl-0", "train")
    spent = json.loads((tmp_path / "cpu" / "rl-0.json").read_text(encoding="utf-8"))["train"]
    assert 2.5 < spent < 6
    with pytest.raises(ChildError, match="ended with 3"):
        metered([sys.executable, "-c", "raise SystemExit(3)"], study, "rl-0", "train")
