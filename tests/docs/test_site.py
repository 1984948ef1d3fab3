"""The documentation site builds strictly, without anything from other sites."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"?((?:https?:)?//[^\" >]+)")


def build(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", root / "site"],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "site_hooks.py", tmp_path / "scripts")
    return tmp_path


def test_the_site_builds_and_loads_nothing_from_elsewhere(root: Path) -> None:
    built = build(root)
    assert built.returncode == 0, built.stderr
    pages = list((root / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert LOADED.findall(text) == [], page
        assert not re.search(r"<code>[^<]*\\\|", text), (
            f"{page} shows the backslash of a table's cell"
        )


def test_broken_links_and_a_page_that_the_navigation_does_not_name_fail_the_build(
    root: Path,
) -> None:
    """Strict mode tells all of them before it aborts."""
    links = ["nowhere.md", "bus.md#nowhere", "../README.md"]
    text = "".join(f"[a link]({link})\n\n" for link in links)
    (root / "docs" / "index.md").write_text(f"# Start\n\n{text}", encoding="utf-8")
    (root / "docs" / "stray.md").write_text("# Stray\n", encoding="utf-8")
    built = build(root)
    assert built.returncode != 0
    for link in links:
        assert re.search(rf"'index\.md' contains a link '{re.escape(link)}'", built.stderr), link
    assert "stray.md" in built.stderr
