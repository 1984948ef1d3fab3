"""What does the test suite cost, and does a test fail beside busy programs?

    python benchmarks/speed/suite.py [--before CHECKOUT] [--runs 10] [--busy 2] [--slowest 40] [--bare]

1. The tests of this checkout run once, alone, three files at a time as scripts/test runs them.
2. With `--before`, the tests of another checkout run once, alone.
3. The files that took longest run `--runs` times beside `--busy` processes that compute without end.

The limit is the processor time of what the tests promise: wall minutes are at least the CPU minutes divided by the
cores. CPU minutes are those of all processes, also of fork servers that outlive the tests (Linux). `--bare` hides
programs and packages as .ci/hidden does: a machine with Python alone. The last line is JSON; the exit status is 1
if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/suite.json"
PARALLEL = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
"""As in scripts/test."""
ORPHANS_S = 30.0
"""Time within which fork servers end once their tests have."""
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
    seconds_by_file: dict[str, float]
    output: Path  # what pytest printed


def measure(
    checkout: Path, files: Sequence[str] = (), *, bare: bool, beside: Collection[int] = ()
) -> SuiteRun:
    """Run files of tests of a checkout, or all, and measure their processes, without the ids `beside`."""
    before, began = _children_cpu_s(beside), time.monotonic()
    environment = os.environ.get("DART_VENV", str(ROOT / ".venv"))
    python = f"{environment}/bin/python"
    process = subprocess.run(
        [*([".ci/hidden"] if bare else []), python, "-m", "pytest", *PARALLEL, *files],
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ
        | {
            "PYTEST_ADDOPTS": "--durations=0 --durations-min=0.05",
            "OMP_NUM_THREADS": "1",
            "DART_VENV": environment,
            "PYTHONPATH": str(checkout.resolve()),  # the environment may have another checkout
        },
    )
    if not (last := _LAST.search(process.stdout)):
        sys.exit(f"no test ran in {checkout}:\n{process.stdout[-2000:]}")
    with tempfile.NamedTemporaryFile("w", prefix="suite-", suffix=".log", delete=False) as output:
        output.write(process.stdout)
    seconds: defaultdict[str, float] = defaultdict(float)
    for duration, file in _DURATION.findall(process.stdout):
        seconds[file] += float(duration)
    return SuiteRun(
        status=process.returncode,
        cpu_minutes=round((_children_cpu_s(beside) - before) / 60, 1),
        minutes=round((time.monotonic() - began) / 60, 1),
        counts=last[1],
        failed=_FAILED.findall(process.stdout),
        seconds_by_file=seconds,
        output=Path(output.name),
    )


def adopt_orphans() -> None:
    """Make this process the parent of processes whose parent has ended, so that their time is counted."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _children_cpu_s(beside: Collection[int]) -> float:
    """Return the processor time of the processes that were below this one; wait for orphans, not for those `beside`."""
    until = time.monotonic() + ORPHANS_S
    while time.monotonic() < until:
        orphans = [child.pid for child in psutil.Process().children() if child.pid not in beside]
        if not orphans:
            break
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Run processes that compute without end, for as long as the block lasts; yield their ids."""
    # A loop ends with its parent, also where that is killed.
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
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
    options = parser.parse_args()
    adopt_orphans()

    result: dict[str, object] = {}
    whole = _report("after", measure(ROOT, bare=options.bare))
    result |= {
        "cpu_minutes_after": whole.cpu_minutes,
        "minutes_after": whole.minutes,
        "tests_after": whole.counts,
        "bare": options.bare,
    }
    if options.before:
        before = _report("before", measure(options.before, bare=options.bare))
        result |= {
            "cpu_minutes_before": before.cpu_minutes,
            "minutes_before": before.minutes,
            "tests_before": before.counts,
        }
    seconds_by_file = whole.seconds_by_file
    files = sorted(seconds_by_file, key=lambda file: -seconds_by_file[file])[: options.slowest]
    beside: list[SuiteRun] = []
    with busy_processes(options.busy) as busy:
        for number in range(options.runs):
            run = measure(ROOT, files, bare=options.bare, beside=busy)
            beside.append(_report(f"beside {options.busy} busy processes, {number + 1}", run))
            result |= {
                "busy": options.busy,
                "files": len(files),
                "runs": len(beside),
                "failures": sum(len(run.failed) for run in beside),
                "failed": sorted({test for run in beside for test in run.failed}),
                "minutes_beside": [run.minutes for run in beside],
                "cpu_minutes_beside": [run.cpu_minutes for run in beside],
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(whole.status != 0 or any(run.status for run in beside))


def _report(name: str, run: SuiteRun) -> SuiteRun:
    print(
        f"{name}: {run.cpu_minutes} CPU minutes, {run.minutes} minutes, {run.counts}; {run.output}",
        *run.failed,
        sep="\n    ",
        flush=True,
    )
    return run


if __name__ == "__main__":
    sys.exit(main())
