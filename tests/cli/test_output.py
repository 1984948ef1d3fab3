"""Standard output and error that are closed, full or not read: each verb, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dart_cli.cli.main import _command
from dart_cli.data.store.open import open_store
from dart_cli.runtime.run_dir import save_config
from dart_cli.runtime.streams import READER_GONE
from tests.cli.test_up import write_config
from tests.data.parts import small_config
from tests.inspection.parts import Played, evaluation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DONE = 300
"""Seconds within which a process ends: a bound, no expectation."""


# --- verbs that print a result, or refuse ------------------------------------------------------

RESULTS = {
    "rollout": "{config} --dry-run",
    "train": "{config} --dry-run",
    "up": "{config} --dry-run",
    "status": "{run} --once",
    "data serve": "{config} --dry-run",
    "data ls": "{run}",
    "data show": "{played} --run {run}",
    "data stats": "{run}",
    "data why": "{played} --run {run} --json",
    "data draw": "{run} --out {new}",
    "data judge": "{run} --limit 1",
    "data collect": "{config} --task nothing --out {new}",
    "data export": "{run} {new} --outcome pass",
    "data import": "{run} {new}",
    "env run": "{config} --dry-run",
    "env check": "mini --task mini/click --seeds 1 --probes oracle --json",
    "env play": "mini click --solution",
    "eval run": "{config} --dry-run",
    "eval compare": "{evaluation} {evaluation}",
    "eval row": "{evaluation} --json",
    "eval grounding": "{new} --model builtin:tiny",
    "explore run": "mini --out {new} --dry-run",
    "explore rows": "{new} {new}",
    "explore tasks": "{new} {new}",
    "model add-pointer": "{new} {new}",
    "model verifier-rows": "{new} {new}",
    "serve": "{config} --dry-run",
    "tune": "--data {new} --model builtin:tiny --out {new} --dry-run",
    "view": "{run} --export {new}.html --trajectory {played}",
    "export": "{run} {new}",
    "doctor": "{config} --json",
    "init": "{new}",
    "keys": "{new}",
}
"""A cheap command of each verb; `{new}` does not exist."""


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of all verbs below a group."""
    for name, below in command.commands.items():
        if hasattr(below, "commands"):
            yield from verbs(below, (*path, name))
        else:
            yield " ".join((*path, name))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run that is over, a configuration, an evaluation."""
    folder = tmp_path_factory.mktemp("streams")
    config = small_config(folder / "over", pool_ratio=0.25, max_staleness=4)
    with open_store(config.run.dir) as store:
        played = Played(config, store)
        save_config(config)
    file = folder / "evaluation.json"
    file.write_text(evaluation("after", 5).model_dump_json())
    return {
        "run": str(config.run.dir),
        "played": f"{played.mixed}-00",
        "config": str(write_config(folder, updates=1)),
        "evaluation": str(file),
    }


@dataclass(frozen=True)
class Ended:
    """What a process left."""

    code: int
    out: str
    err: str


def a_pipe_without_reader() -> int:
    """Where writing fails with EPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def run(arguments: list[str], folder: Path, out: str = "", err: str = "") -> Ended:
    """`dart ARGUMENTS` to its end, with streams that are `closed`, `full` or `gone`, else read."""
    files = {1: folder / "out", 2: folder / "err"}

    def opened(how: str, number: int) -> int:
        if how == "gone":
            return a_pipe_without_reader()
        path = os.devnull if how == "closed" else "/dev/full" if how == "full" else files[number]
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    streams = [opened(out, 1), opened(err, 2)]
    command = [sys.executable, "-m", "dart_cli", *arguments]
    closing = [f"{number}>&-" for number, how in ((1, out), (2, err)) if how == "closed"]
    shell = ["/bin/sh", "-c", f'exec "$@" {" ".join(closing)}', "sh"]
    try:
        process = subprocess.run(
            [*shell, *command],
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            timeout=DONE,
            check=False,
        )
    finally:
        for stream in streams:
            os.close(stream)
    texts = [path.read_text() if path.exists() else "" for path in files.values()]
    return Ended(process.returncode, *texts)


def test_the_table_has_every_verb() -> None:
    assert sorted(RESULTS) == sorted(verbs(_command()))


@pytest.mark.parametrize("verb", RESULTS)
def test_a_verb_ends_in_order_where_its_output_is_closed_full_or_not_read(
    verb: str, places: dict[str, str], tmp_path: Path
) -> None:
    def ended(out: str = "", err: str = "") -> Ended:
        folder = tmp_path / f"out-{out}-err-{err}"
        folder.mkdir()
        values = {**places, "new": str(folder / "new")}
        arguments = [part.format_map(values) for part in RESULTS[verb].split()]
        return run([*verb.split(), *arguments], folder, out, err)

    usual = ended()
    assert usual.code in (0, 1, 2)
    assert "Traceback" not in usual.err
    assert ended("closed", "closed").code == usual.code
    full, gone = ended("full"), ended("gone", "full")
    if usual.out:
        assert full.code in {1, usual.code} - {0}
        assert full.err.splitlines()[-1].startswith("error: standard output: No space left")
        assert gone.code in (READER_GONE, usual.code or READER_GONE)
    else:
        assert (full.code, gone.code) == (usual.code, usual.code)
    assert "Traceback" not in full.err
    assert "Exception ignored" not in full.err
