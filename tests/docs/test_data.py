"""What docs/data.md shows of reading a run works on a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dart_cli.data.store import open_store
from tests.data.parts import make_ledger, play_group, small_config

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_page_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play_group(make_ledger(config, store), ["pass", "fail", "fail", "fail"])
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("runs/quickstart", str(config.run.dir)), {})
    curve, *failed = capsys.readouterr().out.splitlines()
    assert curve.endswith(" 0 0.25")
    assert len(failed) == 3
