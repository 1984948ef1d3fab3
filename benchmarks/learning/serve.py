"""The quickstart's policy, trained by a loop over the chat endpoint and by our environments: the same success?

    python benchmarks/learning/serve.py [--updates 40] [--sessions 16] [--episodes 420] [--folder runs/serve]
        [--out benchmarks/results/serve.json]

Both arms train configs/quickstart.toml with the same seeds, for as many updates, with as many episodes at once.
`native` plays in `dart env`; `served` in docs/examples/chat_loop.py, a process that knows the endpoint of
`dart serve` alone. The weights of each, and those that both began with, play the same held-out episodes,
sampled. The limit is the native arm; the last line is one JSON object, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.data.store.open import open_reader
from dart_cli.evaluation.results import TaskScore, read_evaluation

ROOT = Path(__file__).resolve().parents[2]
LOOP = ROOT / "docs" / "examples" / "chat_loop.py"
CONFIG = ROOT / "configs" / "quickstart.toml"
DART = [sys.executable, "-m", "dart_cli"]
PATIENCE_S = 4 * 3600.0


def main() -> None:
    """Train both arms, evaluate three sets of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=420)
    parser.add_argument("--folder", type=Path, default=Path("runs/serve"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {"updates": asked.updates, "sessions": asked.sessions}
    for arm in ("native", "served"):
        found[arm] = train(arm, asked)
    found["before"] = judged("native", asked, "--model", "builtin:tiny")
    below, above = difference(found["served"], found["native"])
    found["served_minus_native"] = found["served"]["success"] - found["native"]["success"]
    found["interval"] = [below, above]
    told = json.dumps(found)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(told)


def settings(arm: str, asked: argparse.Namespace, port: int = 0) -> list[str]:
    """Return the arm's changes of the quickstart."""
    changes = {
        "run.dir": asked.folder / arm,
        "train.updates": asked.updates,
        "train.max_minutes": 0.0,
        "eval.around": "false",
        "env.slots": asked.sessions,
        "serve.sessions": asked.sessions,
        "serve.port": port,
        "up.serve": str(arm == "served").lower(),
        "up.envs": int(arm == "native"),
    }
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


def train(arm: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Train one arm to its end; its success on held-out episodes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    up = subprocess.Popen([*DART, "up", str(CONFIG), *settings(arm, asked, port)], cwd=ROOT)
    loop = None
    try:
        if arm == "served":
            wait_for(port, up)
            command = [sys.executable, str(LOOP), str(asked.sessions), str(port)]
            loop = subprocess.Popen(command, env=environment())
        if up.wait(PATIENCE_S):
            raise SystemExit(f"{arm}: dart up ended with {up.returncode}")
        if loop is not None:
            loop.wait(60)
    finally:
        for process in (up, loop):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)
    minutes = (time.monotonic() - began) / 60
    with open_reader(asked.folder / arm) as reader:
        played = reader.trajectories_over()
    return {**judged(arm, asked), "minutes": round(minutes, 2), "trajectories": played}


def environment() -> dict[str, str]:
    """Of the loop: it finds the suite that it plays."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def wait_for(port: int, up: subprocess.Popen[bytes]) -> None:
    """Until the endpoint listens."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and up.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("dart serve did not listen within 300 s")


def judged(arm: str, asked: argparse.Namespace, *weights: str) -> dict[str, Any]:
    """Return what the held-out episodes say of an arm's newest weights, or of a model."""
    name = "before" if weights else "after"
    command = [*DART, "eval", str(CONFIG), *settings(arm, asked), "--mode", "sampled"]
    command += ["--episodes", str(asked.episodes), "--keep-as", name, *weights]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    evaluation = read_evaluation(asked.folder / arm, name)
    assert evaluation is not None
    score: TaskScore = evaluation.modes["sampled"].overall
    return {
        "success": (score.success or 0.0),
        "interval": [round(each, 4) for each in score.interval],
        "passed": score.passed,
        "episodes": score.episodes,
        "version": evaluation.policy_version,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """95 % interval of the difference of two proportions (Newcombe 1998, method 10)."""
    gap = one["success"] - other["success"]
    (low, high), (other_low, other_high) = one["interval"], other["interval"]
    below = math.hypot(one["success"] - low, other_high - other["success"])
    above = math.hypot(high - one["success"], other["success"] - other_low)
    return round(gap - below, 4), round(gap + above, 4)


if __name__ == "__main__":
    main()
