"""Do the smoke tests of the recommended configurations pass? They are `dart up CONFIG --smoke-test-minutes 45`.

    python benchmarks/exactness/smoke_tests.py [NAME ...] [--set KEY=VALUE ...]

    ui-tars-7b    configs/ui-tars-7b.toml at 1280x720
    qwen3.5-9b    configs/qwen3.5-9b.toml at 1280x720
    qwen3.5-4b-27b  configs/qwen3.5-4b-27b.toml at 1280x720, where a teacher scores
    lora          ui-tars-7b with adapters of rank 32, at 640x360
    pointer       the same with a pointer head, at 640x360
    osworld       configs/osworld.toml with its three small tasks and one environment process; in place of virtual
                  machines it has displays of Xvfb, each with a server that has the routes of OSWorld's server

The results of a name are the last line of its smoke test (docs/smoke-test.md) and the keys that were set. Results of
names that are not given stay as they are. The limit is the number of cores: with so many minutes nothing is reduced
or left out, as `reduced` and `not_played` show. The last line is JSON.
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
    "qwen3.5-9b": ("qwen3.5-9b.toml", ['env.options={size="1280x720"}']),
    "qwen3.5-4b-27b": ("qwen3.5-4b-27b.toml", ['env.options={size="1280x720"}']),
    "lora": ("ui-tars-7b.toml", [SMALL, "model.lora={rank=32}"]),
    "pointer": ("ui-tars-7b.toml", [SMALL, 'policy.pointing="pointer"']),
    "osworld": ("osworld.toml", ["up.envs=1"]),
}
GUESTS = 2
"""Guests of `osworld`: as many as a smoke test has slots."""


@contextmanager
def guests(name: str) -> Iterator[list[str]]:
    """Yield the overrides that name the guests of a case; the guests run until the block ends."""
    if name != "osworld":
        yield []
        return
    from tests.envs.suites.osworld.conftest import XGuest  # which needs the packages of the tests

    with tempfile.TemporaryDirectory() as folder:
        running: list[XGuest] = []
        try:
            for number in range(GUESTS):
                home = Path(folder) / str(number)
                home.mkdir()
                running.append(XGuest(home))
            urls = json.dumps([guest.url for guest in running])
            yield [f"env.options={{url={urls}, pause_s=0.2}}"]
        finally:
            for guest in running:
                guest.end()


def run_case(name: str, more: list[str]) -> dict[str, Any]:
    """Return the last line of a smoke test, and the overrides that were set."""
    config, sets = CASES[name]
    with tempfile.TemporaryDirectory() as folder, guests(name) as at:
        overrides = [*sets, *more]
        command = [
            sys.executable,
            "-m",
            "dart_cli",
            "up",
            str(ROOT / "configs" / config),
            "--smoke-test-minutes",
            str(MINUTES),
        ]
        for each in [f"run.dir={json.dumps(str(Path(folder) / 'run'))}", *at, *overrides]:
            command += ["--set", each]
        process = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=DEADLINE_S,  # beyond all that its parts may take
        )
        lines = process.stdout.replace(folder, "SCRATCH").splitlines()
    if process.returncode == 2 or not lines:
        raise SystemExit(f"{name}: the smoke test did not begin; its error stands above")
    return {"config": config, "set": overrides, **json.loads(lines[-1])}


def main() -> int:
    """Run the smoke tests and write the results after each; return 1 if a part of one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--set", action="append", default=[], help="passed to every smoke test")
    options = parser.parse_args()
    if unknown := set(options.names) - CASES.keys():
        parser.error(
            f"no such smoke test: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
        )
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in options.names:
        results[name] = run_case(name, options.set)
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    selected = {name: results[name] for name in options.names}
    print(json.dumps({"benchmark": "smoke_tests"} | selected))
    return int(any(result["failed"] for result in selected.values()))


if __name__ == "__main__":
    sys.exit(main())
