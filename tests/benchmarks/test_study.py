"""Studies: what was played is not played again, and figures of other settings never mix."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from benchmarks.learning.study import (
    Cell,
    ResultCache,
    call,
    call_within,
    play_missing,
    settings_of,
)
from bus.errors import ConfigError
from dart_cli.config.load import load_config
from dart_cli.runtime.supervisor import ChildError
from tests.waiting import PATIENCE_S

WANTED = [Cell(arm, seed) for seed in range(2) for arm in ("uniform", "all")]


def silent(_text: str) -> None:
    pass


def cells(folder: Path, settings: object = "same") -> ResultCache:
    return ResultCache(folder, lambda _cell: settings)


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    played: list[str] = []

    def play(cell: Cell) -> dict[str, object]:
        if len(played) == 2:
            raise ChildError("killed", 1)
        played.append(cell.name)
        return {"seed": cell.seed, "arm": cell.arm}

    with pytest.raises(ChildError):
        play_missing(WANTED, cells(tmp_path), play, tell=silent)
    assert played == ["uniform-0", "all-0"]
    played.clear()
    results = play_missing(WANTED, cells(tmp_path), play, tell=silent)
    assert played == ["uniform-1", "all-1"]
    assert list(results) == WANTED
    assert all(result == {"seed": c.seed, "arm": c.arm} for c, result in results.items())


def test_nothing_more_is_begun_after_a_failure(tmp_path: Path) -> None:
    begun: list[str] = []

    def play(cell: Cell) -> dict[str, object]:
        begun.append(cell.name)
        raise ChildError("no model", 2)

    with pytest.raises(ChildError, match="no model"):
        play_missing(WANTED, cells(tmp_path), play, tell=silent)
    assert begun == ["uniform-0"]


def test_more_arms_play_only_what_is_new(tmp_path: Path) -> None:
    played: list[Cell] = []

    def play(cell: Cell) -> dict[str, object]:
        played.append(cell)
        return {}

    play_missing(WANTED[:2], cells(tmp_path), play, tell=silent)
    play_missing(WANTED, cells(tmp_path), play, tell=silent)
    assert played == WANTED


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    cells(tmp_path, {"lr": 1}).put(WANTED[0], {})
    assert cells(tmp_path, {"lr": 1}).get(WANTED[0]) == {}
    with pytest.raises(ConfigError, match="other settings; choose another --work"):
        cells(tmp_path, {"lr": 2}).get(WANTED[0])


def test_several_runs_at_once_all_come_back_in_order(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def play(cell: Cell) -> dict[str, object]:
        together.wait()
        return {"name": cell.name}

    results = play_missing(WANTED, cells(tmp_path), play, at_once=2, tell=silent)
    assert [result["name"] for result in results.values()] == [cell.name for cell in WANTED]


def test_settings_are_all_but_the_place_and_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[train]\nlr = 1e-3\n")

    def settings(*sets: str) -> object:
        return settings_of(load_config(path, list(sets)))

    assert settings("run.seed=1", "run.dir=a") == settings("run.seed=2", "run.dir=b")
    assert settings('data.pool=["a"]') == settings('data.pool=["b"]') != settings()
    assert settings("train.lr=2e-3") != settings()


def test_a_command_gives_the_json_of_its_last_line_and_keeps_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    program = "import sys; print('told'); print('x', file=sys.stderr); print('{\"a\": 1}')"
    assert call([sys.executable, "-c", program], log, tmp_path) == {"a": 1}
    assert {"told", "x"} <= set(log.read_text().splitlines())


def test_a_command_that_fails_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with pytest.raises(ChildError, match=r"ended with 3; see .*a\.log"):
        call([sys.executable, "-c", "raise SystemExit(3)"], log, tmp_path)


def test_a_command_that_has_not_ended_by_its_deadline_is_stopped_and_may_clean_up(
    tmp_path: Path,
) -> None:
    log = tmp_path / "a.log"
    program = (
        "import signal, time\n"
        # A shell that starts the tests in the background has interrupts ignored, and they inherit it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('begun', flush=True)\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('cleaned up')\n"
        "    raise SystemExit(130)\n"
    )
    deadline_s = 0.5
    while True:  # on a busy machine it has not begun by then
        with pytest.raises(ChildError):
            call_within(deadline_s, [sys.executable, "-c", program], log, tmp_path)
        if "begun" in log.read_text().splitlines():
            break
        log.unlink()
        deadline_s *= 2
    assert log.read_text().endswith("cleaned up\n")


def test_a_command_within_a_deadline_that_fails_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    call_within(60, [sys.executable, "-c", "print('done')"], log, tmp_path)
    assert log.read_text().endswith("done\n")
    with pytest.raises(ChildError, match="ended with 3"):
        call_within(60, [sys.executable, "-c", "raise SystemExit(3)"], log, tmp_path)
