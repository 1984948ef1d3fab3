"""What one CUDA machine says of this code: scripts/gpu-check runs it. No network, no installation.

    scripts/gpu-check [--minutes 9] [--only NAME ...] [--out benchmarks/results/gpu.json]
    scripts/gpu-check --device cpu --tiny     # the same code on a small model: a check of the checks

Each check (gpu_kernels.py, gpu_training.py, gpu_serving.py) is a process of its own with a time budget: one that fails, hangs or runs out
of memory is recorded and the next one starts with an empty GPU. A check that this machine's packages
cannot run is `missed`, with the reason. The file is written after each check. The last line is one JSON
object; the exit status is 1 if a check failed.

The processes are forked from one that has imported everything and never touched a GPU, so that torch
is imported once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

State = Literal["ok", "failed", "missed"]
LEAST_S = 5.0  # no check starts with less time left
TESTED = {"torch": "2.11", "transformers": "5.17"}
"""Oldest versions that these checks were written for."""


@dataclass(frozen=True)
class Outcome:
    """One check that is over."""

    name: str
    state: State
    seconds: float
    found: dict[str, Any]
    why: str = ""  # it failed, or was missed


def requirements() -> list[str]:
    """Packages of pyproject.toml that are not installed."""
    import re
    import tomllib

    tree = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    missing = []
    for line in tree["project"]["dependencies"]:
        found = re.match(r"[A-Za-z0-9_.-]+", line)
        try:
            metadata.version(found.group() if found else line)
        except metadata.PackageNotFoundError:
            missing.append(line)
    return missing


def versions() -> dict[str, str]:
    """Of what decides which checks can run."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "safetensors", "peft", "vllm", "pytest"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _child(check: Any, settings: Any, sender: Connection) -> None:
    """Run one check and send what it found, as JSON. It leads a group, so that all it starts ends with it."""
    os.setsid()
    try:
        result = {"state": "ok", "found": check.run(settings)}
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
            "found": getattr(error, "found", {}),
        }
        if not is_missed:
            traceback.print_exc()
    sender.send_bytes(json.dumps(result).encode())
    sender.close()


def run_check(check: Any, settings: Any, seconds: float) -> Outcome:
    """One check in a process of its own, ended after `seconds`."""
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(check, settings, sender))
    process.start()
    sender.close()
    result: dict[str, Any] = {"state": "failed"}
    try:
        if receiver.poll(seconds):
            result = json.loads(receiver.recv_bytes())
        else:
            result["why"] = f"not over after {seconds:.0f} s"
    except EOFError:  # it ended and reported nothing
        process.join(10)
        result["why"] = f"its process ended with {process.exitcode}; was it out of memory?"
    if process.is_alive():
        process.join(5)
    if process.is_alive():
        process.kill()
    process.join()
    with contextlib.suppress(ProcessLookupError):  # what it has started
        os.killpg(process.pid, signal.SIGKILL)
    spent = time.monotonic() - began
    return Outcome(
        check.name, result["state"], spent, result.get("found", {}), result.get("why", "")
    )


def report(outcomes: list[Outcome], began: float) -> dict[str, Any]:
    """All of it, for the file."""
    return {
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
        "failed": [each.name for each in outcomes if each.state == "failed"],
        "missed": {each.name: each.why for each in outcomes if each.state == "missed"},
        "checks": {
            each.name: {"state": each.state, "seconds": round(each.seconds, 1)}
            | ({"why": each.why} if each.why else {})
            | each.found
            for each in outcomes
        },
    }


def main() -> int:
    """Run the checks in order until the time is over."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model on small screens")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    options = parser.parse_args()
    if missing := requirements():
        print(f"not installed: {', '.join(missing)}", flush=True)
    for name, oldest in TESTED.items():
        found = versions()[name]
        numbers = [int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit()]
        if found and numbers < [int(part) for part in oldest.split(".")]:
            print(f"{name} {found} is older than {oldest}: checks that need more are missed")
    try:
        from benchmarks.gpu_settings import Settings
        from benchmarks.gpu_training import CHECKS
    except ImportError as error:
        print(f"nothing can be checked: {error}", file=sys.stderr)
        return 1
    if unknown := set(options.only) - {check.name for check in CHECKS}:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    outcomes: list[Outcome] = []
    scratch = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=_scratch()))
    settings = Settings(options.device, options.tiny, scratch)
    try:
        for check in CHECKS:
            if options.only and check.name not in options.only and not check.is_needed:
                continue
            left = 60 * options.minutes - (time.monotonic() - began)
            if left < LEAST_S:
                outcomes.append(Outcome(check.name, "missed", 0.0, {}, "no time was left"))
                continue
            # On a CPU only the code is checked: how long it takes says nothing.
            budget = left if options.tiny else check.seconds
            outcome = run_check(check, settings, min(left, budget))
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.state} in {outcome.seconds:.1f} s {outcome.why}")
            for key, value in outcome.found.items():
                print(f"    {key}: {value}")
            sys.stdout.flush()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report(outcomes, began), indent=1) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(report(outcomes, began)))
    return int(any(each.state == "failed" for each in outcomes))


def _scratch() -> str | None:
    """Shared memory where it has room for a 7B and its publication, else the temporary directory."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 4 << 30:
        return str(shared)
    return None


if __name__ == "__main__":
    sys.exit(main())
