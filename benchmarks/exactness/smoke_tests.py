"""The configurations that we recommend, rehearsed whole: `dart up CONFIG --rehearse-minutes 45`, two processes of a kind.

    python benchmarks/exactness/smoke_tests.py [NAME ...] [--set KEY=VALUE ...]

    ui-tars-7b    configs/ui-tars-7b.toml at 1280x720
    lora          the same with adapters of rank 32, at 640x360
    pointer       the same with a pointer head, at 640x360
    osworld       configs/osworld.toml with its three small tasks; displays of Xvfb, each with a server that has the
                  routes of OSWorld's, in the place of its virtual machines, one environment process

A name's figures are the rehearsal's last line (docs/smoke-test.md) and what was set. Those of names that are not
asked for stay as they were. The limit is the cores: with so many minutes nothing is reduced or left out, as `reduced` and
`not_played` show. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RESULT = ROOT / "benchmarks" / "results" / "smoke_test.json"
MINUTES = 45
DEADLINE_S = 3000.0
SMALL = 'env.options={size="640x360"}'
CASES = {
    "ui-tars-7b": ("ui-tars-7b.toml", ['env.options={size="1280x720"}']),
    "lora": ("ui-tars-7b.toml", [SMALL, "model.lora={rank=32}"]),
    "pointer": ("ui-tars-7b.toml", [SMALL, 'policy.pointing="pointer"']),
    "osworld": ("osworld.toml", ["up.envs=1"]),
}
GUESTS = 2
"""Of `osworld`: as many as a rehearsal's slots."""


@contextmanager
def guests(name: str) -> Iterator[list[str]]:
    """Yield what is set for the guests that a case needs; they run until the block ends."""
    if name != "osworld":
        yield []
        return
    from tests.envs.suites.osworld.conftest import XGuest  # which needs the packages of the tests

    with tempfile.TemporaryDirectory() as folder:
        running: list[XGuest] = []
        try:
            for each in range(GUESTS):
                home = Path(folder) / str(each)
                home.mkdir()
                running.append(XGuest(home))
            urls = json.dumps([guest.url for guest in running])
            yield [f"env.options={{url={urls}, pause_s=0.2}}"]
        finally:
            for guest in running:
                guest.end()


def rehearsed(name: str, more: list[str]) -> dict[str, Any]:
    """One rehearsal's last line, and what was set."""
    config, sets = CASES[name]
    with tempfile.TemporaryDirectory() as folder, guests(name) as at:
        given = [*sets, *more]
        command = [
            sys.executable,
            "-m",
            "dart_cli",
            "up",
            str(ROOT / "configs" / config),
            "--rehearse-minutes",
            str(MINUTES),
        ]
        for each in [f"run.dir={json.dumps(str(Path(folder) / 'run'))}", *at, *given]:
            command += ["--set", each]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=DEADLINE_S,  # beyond all that its parts may take
        )
        lines = done.stdout.replace(folder, "SCRATCH").splitlines()
    if done.returncode == 2 or not lines:
        raise SystemExit(f"{name}: the rehearsal did not begin; its error stands above")
    return {"config": config, "set": given, **json.loads(lines[-1])}


def main() -> int:
    """Rehearse, write the results after each; 1 where a part of one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--set", action="append", default=[], help="passed to every rehearsal")
    asked = parser.parse_args()
    if unknown := set(asked.names) - CASES.keys():
        parser.error(
            f"no such rehearsal: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
        )
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in asked.names:
        found[name] = rehearsed(name, asked.set)
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    told = {name: found[name] for name in asked.names}
    print(json.dumps({"benchmark": "rehearsals"} | told))
    return int(any(each["failed"] for each in told.values()))


if __name__ == "__main__":
    sys.exit(main())
