"""What docs/data.md shows of reading a run works on a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bus.weights import SyncDone
from dart_cli.data.store.open import open_store
from dart_cli.data.store.rows import UsageRow
from tests.data.parts import make_ledger, play_group, small_config

SYNC = SyncDone(
    worker="rollout-0",
    policy_version=3,
    error="",
    waited_s=0.1,
    transfer_s=0.2,
    pause_s=0.3,
    in_flight=4,
)

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_page_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play_group(make_ledger(config, store), ["pass", "fail", "fail", "fail"])
        store.add_sync(SYNC, 10.0, 11.0)
        store.save_usage([UsageRow("env-0", "playing", "env", 1.0, 40.0, 2.5)])
    curves, timelines = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(curves.replace("runs/quickstart", str(config.run.dir)), {})
    curve, *failed = capsys.readouterr().out.splitlines()
    assert curve.endswith(" 0 0.25")
    assert len(failed) == 3
    exec(timelines.replace("runs/quickstart", str(config.run.dir)), {})
    *episodes, sync, usage = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in episodes] == ["pass", "fail", "fail", "fail"]
    assert sync == "rollout-0 3 11.0 0.3"
    assert usage == "env env-0 playing 42.5"
