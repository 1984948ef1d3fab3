"""What the test suite costs, and whether a test fails beside busy programs.

    python benchmarks/speed/suite.py [--before CHECKOUT] [--runs 10] [--busy 2] [--slowest 40] [--bare]

1. With `--before`, the suite of another checkout runs once, alone.
2. The suite of this checkout runs once, alone: README's test command, with the checks beside it.
3. The files of tests that took longest run `--runs` times beside `--busy` processes that compute without end.

The limit is the processor time of what the tests promise: two cores are never idle while a test could run, so wall
minutes are at least half of the CPU minutes. `--bare` hides programs and packages as .ci/hidden does: a machine with
Python alone. The last line is JSON; the exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/suite.json"
PARALLEL = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
"""As in scripts/test."""
_DURATION = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +([^: ]+)::", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_LAST = re.compile(r"^=+ (.*\bpassed\b.*) in [\d.]+s.* =+$", re.MULTILINE)


@dataclass(frozen=True)
class SuiteRun:
    """One run of tests that is over."""

    status: int
    cpu_minutes: float
    minutes: float
    counts: str  # pytest's own last line
    failed: list[str]
    seconds_by_file: Counter[str]


def measure(checkout: Path, command: Sequence[str], *, bare: bool) -> SuiteRun:
    """Run a command that ends in pytest within a checkout, and measure it with all its processes."""
    before, began = _children_cpu_s(), time.monotonic()
    ended = subprocess.run(
        [*([".ci/hidden"] if bare else []), *command],
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ
        | {"PYTEST_ADDOPTS": "--durations=0 --durations-min=0.05", "OMP_NUM_THREADS": "1"},
    )
    if not (last := _LAST.search(ended.stdout)):
        sys.exit(f"no test ran in {checkout}:\n{ended.stdout[-2000:]}")
    seconds: Counter[str] = Counter()
    for taken, file in _DURATION.findall(ended.stdout):
        seconds[file] += float(taken)
    return SuiteRun(
        status=ended.returncode,
        cpu_minutes=round((_children_cpu_s() - before) / 60, 1),
        minutes=round((time.monotonic() - began) / 60, 1),
        counts=last[1],
        failed=_FAILED.findall(ended.stdout),
        seconds_by_file=seconds,
    )


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that compute without end, for as long as the block lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Run the suite as the module's docstring says; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--runs", type=int, default=10, help="of the slowest files")
    parser.add_argument("--busy", type=int, default=2, help="processes beside them")
    parser.add_argument("--slowest", type=int, default=40, help="files of tests")
    parser.add_argument("--bare", action="store_true", help="as on a machine with Python alone")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()

    result: dict[str, object] = {}
    if asked.before:
        before = _told("before", measure(asked.before, ["scripts/test"], bare=asked.bare))
        result |= {
            "cpu_minutes_before": before.cpu_minutes,
            "minutes_before": before.minutes,
            "tests_before": before.counts,
        }
    whole = _told("after", measure(ROOT, ["scripts/test"], bare=asked.bare))
    result |= {
        "cpu_minutes_after": whole.cpu_minutes,
        "minutes_after": whole.minutes,
        "tests_after": whole.counts,
        "bare": asked.bare,
    }
    files = [file for file, _ in whole.seconds_by_file.most_common(asked.slowest)]
    beside: list[SuiteRun] = []
    python = os.environ.get("DART_VENV", ".venv") + "/bin/python"
    with busy_processes(asked.busy):
        for number in range(asked.runs):
            command = [python, "-m", "pytest", *PARALLEL, *files]
            run = measure(ROOT, command, bare=asked.bare)
            beside.append(_told(f"beside {asked.busy} busy processes, {number + 1}", run))
            result |= {
                "busy": asked.busy,
                "files": len(files),
                "runs": len(beside),
                "failures": sum(len(each.failed) for each in beside),
                "failed": sorted({test for each in beside for test in each.failed}),
                "minutes_beside": [each.minutes for each in beside],
                "cpu_minutes_beside": [each.cpu_minutes for each in beside],
            }
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(whole.status != 0 or any(each.status for each in beside))


def _told(name: str, run: SuiteRun) -> SuiteRun:
    print(
        f"{name}: {run.cpu_minutes} CPU minutes, {run.minutes} minutes, {run.counts}",
        *run.failed,
        sep="\n    ",
        flush=True,
    )
    return run


if __name__ == "__main__":
    sys.exit(main())
