"""How fast does dart play and learn beside the alternatives, on the same task, model folder and cores?

    scripts/setup-peers
    python benchmarks/peers/peers.py [--tasks steps screen] [--seeds 0 1 2] [--minutes 5]
        [--work runs/bench-peers] [--out benchmarks/results/peers.json]

    steps    configs/quickstart.toml: several steps, a screenshot each, `builtin:tiny`
    screen   one_screen.py: one step, `builtin:small`

    dart     `dart up` with the configuration, but all tasks alike often
    plain    plain_loop.py: GRPO in one process, with transformers' `generate`
    trl      trl_loop.py: TRL's GRPOTrainer, of `screen` alone: CANNOT says why

One run at a time, each on all cores. Of each arm, over seeds:

    trajectories_s   finished in a second, from the first one on
    cpu_s_to, trajectories_to   from the beginning of play until the newest 256 succeed to 0.6, 0.8, 0.9; null if never
    peak_mb          memory of all its processes together

and of each peer `..._ratio`: dart's figure divided by the peer's. CPU seconds and memory are read four
times a second from the processes that live. A run's figures are kept in --work and it is not played again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.study import (  # noqa: E402 - after the path
    Cell,
    ResultCache,
    dart,
    overrides,
    play_missing,
)
from bus.errors import DartError  # noqa: E402 - likewise
from dart_cli.config.load import load_config  # noqa: E402 - likewise
from dart_cli.data.store.open import open_reader  # noqa: E402 - likewise

LEVELS = (0.6, 0.8, 0.9)
NEWEST = 256
POLL_S = 0.25
START_S = 120.0
"""That loading may take beside the minutes of training."""
END_S = 60.0
"""From being told to end until it is killed."""
CONFIGS = {
    "steps": ("configs/quickstart.toml", ()),
    "screen": (
        "docs/examples/guests.toml",
        ("env.suite=benchmarks/peers/one_screen.py:OneScreenSuite",),
    ),
}
PEERS = {"steps": ("plain",), "screen": ("plain", "trl")}
CANNOT = (
    "several steps in the model's own action language: GRPOTrainer plays further turns only where the chat template knows "
    "tool calls (chat_template_utils.supports_tool_calling), and an environment's first screen is text alone "
    "(trainer/grpo_trainer.py, environment_factory: reset returns None or a string)"
)


@dataclass
class Run:
    """One run: what its processes used, and when its trajectories ended."""

    used: list[tuple[float, float, float]] = field(default_factory=list)  # unix time, CPU s, MB
    began: float = 0.0  # when play began, unix time
    episodes: list[tuple[float, bool | None]] = field(default_factory=list)
    """Trajectories in order: when, and whether it passed; None of one that was played because of others' failure."""

    def cpu_at(self, moment: float) -> float:
        """Return the CPU seconds used until a moment."""
        return max((cpu for at, cpu, _ in self.used if at <= moment), default=0.0)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the table in the module's docstring."""
        times = [at for at, _ in self.episodes]
        outcomes = [
            (count, one) for count, (_, one) in enumerate(self.episodes, 1) if one is not None
        ]
        to: dict[str, Any] = {"cpu_s_to": {}, "trajectories_to": {}}
        for level in LEVELS:
            windows = (outcomes[end - NEWEST : end] for end in range(NEWEST, len(outcomes) + 1))
            reached = next(
                (part[-1][0] for part in windows if fmean(one for _, one in part) >= level), None
            )
            cpu = reached and self.cpu_at(times[reached - 1]) - self.cpu_at(self.began)
            to["cpu_s_to"][str(level)] = None if cpu is None else round(cpu, 1)
            to["trajectories_to"][str(level)] = reached
        return {
            "trajectories": len(times),
            "trajectories_s": round((len(times) - 1) / max(1e-9, times[-1] - times[0]), 2),
            "trajectories_cpu_s": round(
                len(times) / max(1e-9, self.cpu_at(times[-1]) - self.cpu_at(self.began)), 2
            ),
            **to,
            "success_end": round(fmean(one for _, one in outcomes[-NEWEST:]), 3),
            "peak_mb": round(max(mb for _, _, mb in self.used)),
        }


def play(arm: str, task: str, seed: int, minutes: float, python: str) -> Run:
    """Play one run. Raises SystemExit where it fails."""
    config, sets = CONFIGS[task]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        if arm == "dart":
            own = [f"run.dir={run}", f"run.seed={seed}", "eval.around=false"]
            own += [f"train.max_minutes={minutes}", "train.stop_at=0", "train.updates=100000"]
            own += ["data.task_sampling=uniform"]  # as theirs, so that their successes compare
            command = [*dart("up", config), *overrides([*sets, *own])]
        else:
            script = "plain_loop.py" if arm == "plain" else "trl_loop.py"
            command = [sys.executable if arm == "plain" else python, f"benchmarks/peers/{script}"]
            command += [config, "--seed", str(seed), "--minutes", str(minutes), *overrides(sets)]
        record = watched(command, 60 * minutes + START_S, Path(scratch) / "log")
        if arm == "dart":
            with open_reader(run) as reader:
                rows = [
                    trajectory
                    for trajectory in reader.trajectories()
                    if trajectory.outcome in ("pass", "fail")
                ]
            record.began = min(row.leased_at for row in rows)
            # Early stop plays the second half of a group only where one of the first failed.
            half = load_config(ROOT / config, [*sets, *own]).data.group_size // 2
            rows.sort(key=lambda row: row.ended_at or 0.0)
            record.episodes = [
                (row.ended_at or 0.0, row.outcome == "pass" if row.attempt < half else None)
                for row in rows
            ]
    return record


def watched(command: list[str], deadline_s: float, log: Path) -> Run:
    """Run a command whose lines of JSON are trajectories. Raises SystemExit where it fails."""
    run = Run()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        reading = threading.Thread(target=_read, args=(process, run))
        reading.start()
        end = time.monotonic() + deadline_s
        while process.poll() is None:
            if (late := time.monotonic() - end) > 0:
                process.kill() if late > END_S else process.terminate()
            _poll(process.pid, run)
            time.sleep(POLL_S)
        reading.join()
    if process.returncode:
        raise SystemExit(
            f"error: {' '.join(command)} ended with {process.returncode}: {log.read_text()[-2000:]}"
        )
    return run


def _poll(pid: int, run: Run) -> None:
    cpu = memory = 0.0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return
    for process in tree:
        try:
            times = process.cpu_times()
            cpu += times.user + times.system
            memory += process.memory_full_info().pss / 1e6
        except psutil.Error:
            continue
    run.used.append((time.time(), cpu, memory))


def _read(process: subprocess.Popen[str], run: Run) -> None:
    assert process.stdout is not None
    count = 0
    for line in process.stdout:
        if not line.startswith('{"trajectories"'):
            continue
        event = json.loads(line)
        if event["trajectories"] == 0:
            run.began = time.time()
            continue
        new = event["trajectories"] - count
        passed = round(event["success"] * new)
        run.episodes += [(time.time(), place < passed) for place in range(new)]
        count = event["trajectories"]


def beside(task: str, options: argparse.Namespace, python: str) -> dict[str, Any]:
    """Play all arms of a task, one run after the other."""
    arms = ("dart", *PEERS[task])
    cells = {Cell(f"{task}-{arm}", seed): arm for seed in options.seeds for arm in arms}
    results = play_missing(
        list(cells),
        ResultCache(options.work, lambda _: options.minutes),
        lambda cell: play(cells[cell], task, cell.seed, options.minutes, python).figures(),
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    runs = {
        arm: [figures for cell, figures in results.items() if cells[cell] == arm] for arm in arms
    }
    return {**runs, **{f"{peer}_ratios": ratios(runs["dart"], runs[peer]) for peer in PEERS[task]}}


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return our figures divided by a peer's, of means over seeds; null where one of them did not get there."""

    def mean(runs: list[dict[str, Any]], *path: str) -> float | None:
        values = []
        for run in runs:
            value: Any = run
            for key in path:
                value = value[key]
            values.append(value)
        return None if None in values else fmean(values)

    paths = {
        "trajectories_s_ratio": ("trajectories_s",),
        "trajectories_cpu_s_ratio": ("trajectories_cpu_s",),
        "cpu_s_to_080_ratio": ("cpu_s_to", "0.8"),
        "trajectories_to_080_ratio": ("trajectories_to", "0.8"),
        "peak_memory_ratio": ("peak_mb",),
    }
    quotients = {}
    for name, path in paths.items():
        one, other = mean(ours, *path), mean(theirs, *path)
        quotients[name] = None if one is None or other is None else round(one / other, 3)
    return quotients


def main() -> None:
    """Play the chosen arms, write the results and print them as one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, each run")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="of setup-peers")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-peers"))
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    python = str(options.peers / "bin" / "python")
    if "screen" in options.tasks and not Path(python).exists():
        raise SystemExit(f"error: no {python}: run scripts/setup-peers")
    print_version = "import trl; print(trl.__version__)"
    try:
        of_tasks = {task: beside(task, options, python) for task in options.tasks}
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    result: dict[str, Any] = {
        "benchmark": "peers",
        "minutes": options.minutes,
        "seeds": options.seeds,
        "versions": {"transformers": version("transformers"), "torch": version("torch")},
        **of_tasks,
    }
    if "screen" in options.tasks:
        trl = subprocess.run(
            [python, "-c", print_version], capture_output=True, text=True, check=True
        )
        result["trl"] = {
            "version": trl.stdout.strip(),
            **result["screen"]["trl_ratios"],
            "cannot": CANNOT,
        }
    if "steps" in options.tasks:
        result["plain_loop"] = {
            "version": f"transformers {version('transformers')}",
            **result["steps"]["plain_ratios"],
            "cannot": "",
        }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
