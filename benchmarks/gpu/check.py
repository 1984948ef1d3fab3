"""Does this code work on one CUDA machine, and how fast? scripts/gpu-check runs it, without network or installation.

    scripts/gpu-check [--minutes 9] [--only NAME ...] [--out FILE]
    scripts/gpu-check --device cpu --tiny     # the same code on a small model: a check of the checks

Each check (kernels.py, training.py, serving.py, ranks.py, loop.py) is a separate process: one that fails, hangs
or runs out of memory is recorded and the next one starts with an empty GPU. A check that this machine's
packages cannot run is `missed`, with the reason; torch alone must be there.

All checks share one deadline. Each has a share of the time in seconds and what those before it did not
use, so none takes a later one's. A spare check has no share: it runs in what the others leave, so on a machine
without vLLM or a second GPU. What the time did not suffice for is `left_out`. The command ends by
`--minutes`, whatever hangs:

    RESERVE_S before it     no check runs any more; scratch files are removed
    ALARM_S before it       what still runs is killed, and the report is printed
    at the end              the process exits, even if nothing of Python's runs any more

The file is written after each check. A whole run on CUDA writes benchmarks/results/gpu.json, any other
one gpu-trial.json in the temporary directory, where `--out` names no file. The last line is one JSON
object; the exit status is 1 if a check failed.

The processes are forked from one that has imported what there is and never touched a GPU, so that torch
is imported once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

State = Literal["ok", "failed", "missed", "left_out"]
LEAST_S = 5.0  # no check starts with less time left
RESERVE_S = 15.0
ALARM_S = 5.0
STACK_S = 1.0  # for a check to write where it is, once its time is over
END_S = 3.0  # that a check which has reported, or was killed, may take to be gone
RESULT = ROOT / "benchmarks/results/gpu.json"
TESTED = {"torch": "2.11", "transformers": "5.17"}
"""Oldest versions that these checks were written for."""


@dataclass(frozen=True)
class Check:
    """One check and its share of the time in seconds, a bound. `run` takes Settings."""

    name: str
    run: Callable[[Any], dict[str, Any]]
    seconds: float
    is_spare: bool = False  # it runs in time that no check with a share needs
    is_needed: bool = False  # by others: it runs whatever --only says


def within(module: str, function: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function of a module that is imported when it is called, so that only this check needs its packages."""

    def run(settings: Any) -> dict[str, Any]:
        figures: dict[str, Any] = getattr(importlib.import_module(module), function)(settings)
        return figures

    return run


_KERNELS, _TRAINING, _SERVING, _RANKS, _LOOP = MODULES = tuple(
    f"benchmarks.gpu.{name}" for name in ("kernels", "training", "serving", "ranks", "loop")
)
CHECKS = (
    Check("machine", within(_KERNELS, "machine"), 8),
    Check("attention", within(_KERNELS, "attention"), 8),
    Check("model", within(_TRAINING, "model"), 25, is_needed=True),
    Check("parity", within(_SERVING, "parity"), 15),
    Check("vllm", within(_SERVING, "vllm"), 115),
    Check("two_gpus", within(_RANKS, "two_gpus"), 45),
    Check("update", within(_TRAINING, "update"), 50),
    Check("publication", within(_SERVING, "publication"), 34),
    Check("tests", within(_KERNELS, "tests"), 50),
    Check("one_by_one", within(_TRAINING, "one_by_one"), 55, is_spare=True),
    Check("lora", within(_TRAINING, "lora"), 55, is_spare=True),
    Check("plain_loop", within(_TRAINING, "plain_loop"), 40, is_spare=True),
    Check("loop", within(_LOOP, "loop"), 105),
)
"""The most valuable first, but for `loop`, which takes the model's memory."""


def allowance(check: Check, later: Sequence[Check], left: float) -> float:
    """Return the seconds that `check` may take of the seconds left, so that each of `later` keeps its share.

    A spare check keeps none. Where the shares are more than is left, all are less in the same ratio.
    """
    theirs = sum(run.seconds for run in later if not run.is_spare)
    if check.is_spare:
        return max(0.0, left - theirs)
    return left - theirs * min(1.0, left / (check.seconds + theirs))


@dataclass(frozen=True)
class Outcome:
    """One check that is over."""

    name: str
    state: State
    seconds: float  # that it took
    measured: dict[str, Any]
    why: str = ""  # it failed, or was missed or left out


@dataclass
class Run:
    """The checks of one call of the command, and its clock."""

    checks: Sequence[Check]
    out: Path
    scratch: Path
    began: float
    limit_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    current: BaseProcess | None = None  # leads a separate process group

    def left(self) -> float:
        """Return the seconds that checks may still take."""
        return self.limit_s - RESERVE_S - (time.monotonic() - self.began)

    def all(self, settings: Any) -> None:
        """Run one check after the other, and write what was found after each."""
        for number, check in enumerate(self.checks):
            left = self.left()
            if left < LEAST_S:
                self.outcomes += [
                    _left_out(check, "no time was left") for check in self.checks[number:]
                ]
                self.write()
                return
            seconds = allowance(check, self.checks[number + 1 :], left)
            if seconds < LEAST_S:
                self.outcomes.append(_left_out(check, "the other checks need the time"))
                continue
            outcome = self.one(check, settings, seconds)
            self.outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.state} in {outcome.seconds:.1f} s {outcome.why}")
            for key, value in outcome.measured.items():
                print(f"    {key}: {value}")
            sys.stdout.flush()
            self.write()

    def one(self, check: Check, settings: Any, seconds: float) -> Outcome:
        """Run one check in a separate process, which is ended after `seconds`."""
        began = time.monotonic()
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        stack = self.scratch / "stack.txt"
        stack.unlink(missing_ok=True)
        process = context.Process(target=_child, args=(check, settings, sender, stack, seconds))
        process.start()
        self.current = process
        sender.close()
        result: dict[str, Any] = {"state": "failed"}
        try:
            if receiver.poll(seconds):
                result = json.loads(receiver.recv_bytes())
            elif seconds < check.seconds:
                why = f"not over in the {seconds:.0f} s left to it{_stack_of(process, stack)}"
                result = {"state": "left_out", "why": why}
            else:
                result["why"] = f"not over after {seconds:.0f} s{_stack_of(process, stack)}"
        except EOFError:  # it ended and reported nothing
            process.join(END_S)
            result["why"] = f"its process ended with {process.exitcode}; was it out of memory?"
        process.join(END_S if "why" not in result else 0)
        self.end_current()
        spent = time.monotonic() - began
        return Outcome(
            check.name, result["state"], spent, result.get("found", {}), result.get("why", "")
        )

    def end_current(self) -> None:
        """Kill the present check and what it has started; one that a driver holds is left behind."""
        process, self.current = self.current, None
        if process is None or process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.is_alive():
            process.kill()
        process.join(END_S)

    def write(self) -> None:
        """Write the report so far."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(self.as_text(self.report(), indent=1) + "\n")

    def as_text(self, report: dict[str, Any], indent: int | None = None) -> str:
        """Return a report as JSON, without the name of this machine's scratch folder."""
        return json.dumps(report, indent=indent).replace(str(self.scratch), "SCRATCH")

    def report(self) -> dict[str, Any]:
        """Return the whole report for the file; a check that has not begun is left out."""
        over = {outcome.name for outcome in self.outcomes}
        outcomes = [
            *self.outcomes,
            *(_left_out(check, "not over") for check in self.checks if check.name not in over),
        ]
        return {
            "versions": versions(),
            "not_installed": requirements(),
            "seconds": round(time.monotonic() - self.began, 1),
            "limit_s": self.limit_s,
            "failed": [outcome.name for outcome in outcomes if outcome.state == "failed"],
            "missed": {
                outcome.name: outcome.why for outcome in outcomes if outcome.state == "missed"
            },
            "left_out": {
                outcome.name: outcome.why for outcome in outcomes if outcome.state == "left_out"
            },
            "checks": {
                outcome.name: {
                    "state": outcome.state,
                    "seconds": round(outcome.seconds, 1),
                    "why": outcome.why,
                    "measured": outcome.measured,
                }
                for outcome in outcomes
            },
        }

    def finish(self) -> int:
        """Print the last line and return the exit status."""
        report = self.report()
        if report["left_out"]:
            print(f"left out: {', '.join(report['left_out'])}")
        print(self.as_text(report), flush=True)
        return int(bool(report["failed"]))

    def watch(self) -> None:
        """End this process by the limit, whatever it waits for."""
        left = max(0.1, self.limit_s - (time.monotonic() - self.began))
        signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, left - ALARM_S))
        faulthandler.dump_traceback_later(left, exit=True)

    def _alarm(self, _number: int, _frame: FrameType | None) -> None:
        self.end_current()
        self.write()
        status = self.finish()
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(status)


def _left_out(check: Check, why: str) -> Outcome:
    return Outcome(check.name, "left_out", 0.0, {}, why)


def _child(check: Check, settings: Any, sender: Connection, stack: Path, seconds: float) -> None:
    """Run one check and send what it found, as JSON. It leads a group, so that all it starts ends with it.

    On SIGUSR1 it writes to `stack` where it is.
    """
    os.setsid()
    _end_with_parent()
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"))
    try:
        result = {"state": "ok", "found": check.run(replace(settings, seconds=seconds))}
    except ImportError as error:
        result = {"state": "missed", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - recorded
        is_missed = type(error).__name__ in ("MissedError", "MissingPartError")
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        result = {
            "state": "missed" if is_missed else "failed",
            "why": str(error)
            if is_missed
            else f"{text} ({Path(where.filename).name}:{where.lineno})",
            "found": getattr(error, "figures", {}),
        }
        if not is_missed:
            traceback.print_exc()
    sender.send_bytes(json.dumps(result).encode())
    sender.close()


def _stack_of(process: BaseProcess, stack: Path) -> str:
    """Return where a check is, as it reported itself; empty where it reported nothing."""
    if process.pid is None or not stack.exists():  # without a handler the signal would end it
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    until = time.monotonic() + STACK_S
    while not (text := place(stack)) and time.monotonic() < until:
        time.sleep(0.02)
    return text


def place(stack: Path) -> str:
    """Return the innermost lines of our own code in the stack of a check that was not over; empty without one.

    The thread that was interrupted is written last. Where it has none of them, those of another count.
    """
    try:
        others, _, interrupted = stack.read_text(encoding="utf-8").rpartition("Current thread")
    except OSError:
        return ""
    lines = [*interrupted.splitlines(), *others.splitlines()]
    ours = [line for line in lines if f'"{ROOT}/' in line and "/site-packages/" not in line][:3]
    places = [re.sub(r'.*/([^/"]+)", line (\d+) in (\S+)', r"\1:\2 \3", frame) for frame in ours]
    return f"; in {' < '.join(places)}" if places else ""


def _end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def requirements() -> list[str]:
    """Return the packages of pyproject.toml that are not installed."""
    import tomllib

    tree = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    missing = []
    for line in tree["project"]["dependencies"]:
        match = re.match(r"[A-Za-z0-9_.-]+", line)
        try:
            metadata.version(match.group() if match else line)
        except metadata.PackageNotFoundError:
            missing.append(line)
    return missing


def versions() -> dict[str, str]:
    """Return the versions that decide which checks can run."""
    installed = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "safetensors", "peft", "vllm", "pytest"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = ""
    return installed


def result_file(device: str, *, tiny: bool, only: Sequence[str]) -> Path:
    """Return where the report is written: a trial, or a part of the checks, replaces no result."""
    if device.startswith("cuda") and not tiny and not only:
        return RESULT
    return Path(tempfile.gettempdir()) / "gpu-trial.json"


def main() -> int:
    """Run the checks in order until the time is over."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model on small screens")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, help="the report's file")
    options = parser.parse_args()
    if unknown := set(options.only) - {check.name for check in CHECKS}:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    checks = [
        check
        for check in CHECKS
        if not options.only or check.name in options.only or check.is_needed
    ]
    out = options.out or result_file(options.device, tiny=options.tiny, only=options.only)
    scratch = Path(tempfile.mkdtemp(prefix=f"gpu-check-{os.getpid()}-", dir=_scratch()))
    run = Run(checks, out, scratch, began, 60 * options.minutes)
    run.watch()
    _warn()
    try:
        from benchmarks.gpu.settings import Settings

        for module in MODULES:
            with contextlib.suppress(ImportError):  # each check says what it lacks
                importlib.import_module(module)
        run.all(Settings(options.device, options.tiny, scratch))
    except ImportError as error:
        print(f"nothing can be checked: {error}", file=sys.stderr)
        run.outcomes += [Outcome(check.name, "missed", 0.0, {}, str(error)) for check in checks]
        run.finish()
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"written to {out}")
    return run.finish()


def _warn() -> None:
    """Print which packages are missing or old before any check runs."""
    if missing := requirements():
        print(f"not installed: {', '.join(missing)}", flush=True)
    for name, oldest in TESTED.items():
        version = versions()[name]
        numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
        if version and numbers < [int(part) for part in oldest.split(".")]:
            print(f"{name} {version} is older than {oldest}: checks that need more are missed")


def _scratch() -> str | None:
    """Return shared memory where it has room for a 7B and its publication, else the temporary directory."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 4 << 30:
        return str(shared)
    return None


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a check that a driver holds would be waited for
