"""Standard output and error that are closed, full or not read: each verb, in real processes.

Most are forks of one process that has loaded what all need; a new process takes its streams as they do, before it
loads anything.
"""

from __future__ import annotations

import json
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
from tests.inspection.parts import PlayedRun, evaluation
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

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
IN_A_NEW_PROCESS = ("up", "data stats", "env check", "view", "init", "keys")
"""One verb of each kind: a part of a run, of the store, of an environment, of a server, and two that write files."""


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
        played = PlayedRun(config, store)
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


def code_with_closed_streams(arguments: list[str]) -> int:
    """Run `dart ARGUMENTS` in a new process without standard output and error; return its code."""
    command = ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "dart_cli"]
    ended = subprocess.run(
        [*command, *arguments], stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False
    )
    return ended.returncode


FORKS = """
import atexit, gc, json, os, sys
import matplotlib.pyplot, PIL.Image, pyarrow.parquet, rich.table, transformers, uvicorn, zmq.asyncio
import dart_cli.cli.up, dart_cli.doctor.examine, dart_cli.evaluation.evaluate, dart_cli.export.folder
import dart_cli.inspection.run_lookup, dart_cli.inspection.terminal, dart_cli.policy.loader, dart_cli.status.watch
from dart_cli.cli.main import _command, main
from dart_cli.doctor.machine import ask_torch
from dart_cli.language.parsers import make_action_parser

for cached in (_command, ask_torch, lambda: make_action_parser("compact"), lambda: make_action_parser("uitars")):
    cached()
dart_cli.status.watch.ANSWER_S = 0.5  # for data, which no child has
gc.freeze()  # a child does not visit what is loaded here
for line in sys.stdin:
    arguments, places = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
for number, place in enumerate(places, start=1):
    if place == "closed":
        os.close(number)
        continue
    reader, pipe = os.pipe()
    os.close(reader)
    os.dup2(pipe if place == "gone" else os.open(place, os.O_RDWR | os.O_CREAT, 0o600), number)
if "closed" in places:
    sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = None  # as in a new process
sys.argv = ["dart", *arguments]
try:
    main()
except SystemExit as end:  # as Python ends, which then takes each loaded module apart
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(end.code or 0)
"""
"""A process that has loaded what is slow to load, and forks one for each line: `dart ARGUMENTS`, to its end."""


class Forks:
    """Starts `dart` many times for the price of one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: list[str], folder: Path, out: str = "", err: str = "") -> Ended:
        """Run `dart ARGUMENTS` with streams that are `closed`, `full` or `gone`, else read."""
        folder.mkdir()
        files = [folder / "out", folder / "err"]
        places = [
            {"full": "/dev/full", "": str(file)}.get(how, how)
            for how, file in zip((out, err), files, strict=True)
        ]
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([arguments, places]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Ended(code, *(file.read_text() if file.exists() else "" for file in files))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks()
    yield found
    found.close()


def test_the_table_has_every_verb() -> None:
    assert sorted(RESULTS) == sorted(verbs(_command()))


@pytest.mark.parametrize("verb", RESULTS)
def test_a_verb_ends_in_order_where_its_output_is_closed_full_or_not_read(
    verb: str, places: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    def arguments(folder: Path) -> list[str]:
        values = {**places, "new": str(folder / "new")}
        return [*verb.split(), *(part.format_map(values) for part in RESULTS[verb].split())]

    def ended(out: str = "", err: str = "") -> Ended:
        folder = tmp_path / f"out-{out}-err-{err}"
        return forks.run(arguments(folder), folder, out, err)

    usual = ended()
    assert usual.code in (0, 1, 2)
    assert "Traceback" not in usual.err
    assert ended("closed", "closed").code == usual.code
    if verb in IN_A_NEW_PROCESS:
        assert code_with_closed_streams(arguments(tmp_path)) == usual.code
    full, gone = ended("full"), ended("gone", "full")
    if usual.out:
        assert full.code in {1, usual.code} - {0}
        assert full.err.splitlines()[-1].startswith("error: standard output: No space left")
        assert gone.code in (READER_GONE, usual.code or READER_GONE)
    else:
        assert (full.code, gone.code) == (usual.code, usual.code)
    assert "Traceback" not in full.err
    assert "Exception ignored" not in full.err
