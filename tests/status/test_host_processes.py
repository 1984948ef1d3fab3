"""A data process that does not answer: what is known of it on this host."""

from __future__ import annotations

import os
from pathlib import Path

from dart_cli.status.host_processes import last_error, why_absent


def test_a_data_process_that_does_not_answer_is_reported_with_its_state(tmp_path: Path) -> None:
    assert why_absent(tmp_path).startswith("waits for dart data: start `dart data CONFIG`")
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "env-0.lock").write_text(str(os.getpid()))
    assert why_absent(tmp_path).endswith("or `dart up CONFIG`; env-0 wait for it")
    (tmp_path / "workers" / "env-0.lock").unlink()
    (tmp_path / "workers" / "data.lock").write_text(str(os.getpid()))
    assert "runs but does not answer; dart status --stacks" in why_absent(tmp_path)
    os.utime(tmp_path / "workers" / "data.lock", (0, 0))  # its number is another's by now
    assert f"data (pid {os.getpid()}) has ended; start `dart data CONFIG`" in why_absent(tmp_path)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "data.log"
    log.write_text("x INFO p: data starts, pid 1, run r\nStoreError: run.db: disk is full\n")
    assert "has ended: StoreError: run.db: disk is full; fix that" in why_absent(tmp_path)
    log.write_text(
        "x INFO p: data starts, pid 1, run r\n"
        "x INFO s: the run is over: 30 updates are done\n"
        "x INFO p: data ended\n"
    )
    assert why_absent(tmp_path).startswith("the run is over: 30 updates are done; `dart view")


def test_over_tcp_a_data_process_that_lives_may_have_other_keys(tmp_path: Path) -> None:
    assert "start `dart data CONFIG`" in why_absent(tmp_path, tcp=True)
    assert "bus.host, bus.port or bus.keys differ" in why_absent(tmp_path, tcp=True)
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "data.lock").write_text(str(os.getpid()))
    told = why_absent(tmp_path, tcp=True)
    assert "shows what it does; or bus.host, bus.port or bus.keys differ" in told
    assert "bus.keys" not in why_absent(tmp_path)


def test_only_the_error_of_the_last_start_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "data.log"
    assert last_error(log) == ""
    log.write_text(
        "x INFO p: data starts, pid 1, run r\n"
        "x ERROR p: data ends with an error\n"
        "Traceback (most recent call last):\n"
        "bus.errors.StoreError: run.db: database or disk is full; free space\n"
    )
    assert last_error(log) == "StoreError: run.db: database or disk is full; free space"
    with log.open("a") as file:
        file.write("x INFO p: data starts, pid 2, run r\n")
    assert last_error(log) == ""


def test_what_ended_a_process_is_told_until_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    data, train = (tmp_path / "workers" / f"{name}.lock" for name in ("data", "train"))
    data.write_text("4194303\nrun.db: disk is full; free space".ljust(1023) + "\n")
    train.write_text("4194303\nc000010 cannot be written".ljust(1023) + "\n")
    told = why_absent(tmp_path)
    assert "data (pid 4194303) has ended: run.db: disk is full; free space; fix that" in told
    assert told.endswith("; train has ended: c000010 cannot be written")
    train.write_text(f"{os.getpid()}\n".ljust(1023) + "\n")
    assert why_absent(tmp_path).endswith("; train wait for it")
