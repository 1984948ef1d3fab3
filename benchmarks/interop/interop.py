"""Other people's environments: our verdicts against theirs, our steps beside those of their own client.

    python benchmarks/interop/interop.py [--arms cuabench openenv ...] [--episodes 40] [--steps 10]
        [--out benchmarks/results/interop.json]

An arm is one adapter. Both sides play the same episodes (task, seed, actions; some reach the goal, some do
not), in turn: our adapter through the contract of envs/contract/base.py, and the environment's own client or its
own `step`. `false_pass` and `false_fail` count the episodes where our verdict is not the environment's
own. The limit is the environment's own step, `own_steps_per_second`; steps include the screenshot as the
policy gets it.

An arm whose parts are not installed is left out, with the reason in `skipped`. An arm of your own is an
entry of ARMS: a function that takes `Asked` and returns what `compared` does (benchmarks/interop/parts.py).
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.interop.parts import Asked, NotInstalledError, Result
from bus.errors import MissingPartError

ARMS = {
    "browsergym": "benchmarks.interop_browsergym:play",
    "gym": "benchmarks.interop_gym:play",
    "cuabench": "benchmarks.interop_cuabench:play",
    "openenv": "benchmarks.interop_openenv:play",
    "openenv_list": "benchmarks.interop_openenv:play_list",
    "osworld": "benchmarks.interop_osworld:play",
}
"""Name -> `module:function` of an arm, imported when it is played."""


def play_arm(name: str, asked: Asked) -> Result:
    """One arm. Raises NotInstalledError where a part of it is missing."""
    module, _, function = ARMS[name].partition(":")
    try:
        play = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise NotInstalledError(f"no module {error.name}") from None
    try:
        result: Result = play(asked)
    except MissingPartError as error:
        raise NotInstalledError(str(error)) from None
    return result


def main() -> None:
    """Play the arms and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--episodes", type=int, default=40, help="of each side of an arm")
    parser.add_argument("--steps", type=int, default=10, help="of an episode, at most")
    parser.add_argument("--out", type=Path, help="the result also goes into this file")
    arguments = parser.parse_args()
    asked = Asked(arguments.episodes, arguments.steps)
    arms: dict[str, Result] = {}
    skipped: dict[str, str] = {}
    for name in arguments.arms:
        began = time.monotonic()
        try:
            arms[name] = play_arm(name, asked)
        except NotInstalledError as error:
            skipped[name] = str(error)
            print(f"{name}: skipped: {error}", flush=True)
            continue
        arms[name]["seconds"] = round(time.monotonic() - began, 1)
        print(f"{name}: {json.dumps(arms[name])}", flush=True)
    result = {
        "benchmark": "interop",
        "arms": arms,
        "skipped": skipped,
        "false_pass": sum(arm["false_pass"] for arm in arms.values()),
        "false_fail": sum(arm["false_fail"] for arm in arms.values()),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
