"""Is anything lost or trained twice when a random process of a run is killed (kill -9) every few seconds?

    python benchmarks/faults/chaos.py --seconds 1800 --control --picture chaos.png   # a kill every 5 s
    python benchmarks/faults/chaos.py --seconds 1800 --every 60 --control            # one kill a minute

The quickstart's processes and a `dart status` that watches, started again with the same commands by a
supervisor. The roles are killed in turn, each about seconds / (5 every) times: 72 times in half an
hour at the default. `--control` first runs the same without kills for equally long, then compares the
pace and draws both learning curves. The runs stay in `run.dir` and `run.dir`-control for `dart view`.

The limit is a run that loses nothing. The last line is JSON. `finished_lost`, `double_trained` and
`never_trained` must be 0, `steps_lost_max` at most 1, and `ended_alone`, processes that ended without being killed, empty; else the exit code is 1.
With `--set train.reuse=1` batches are trained on again: that holds for each use of a batch, and `replays`
counts them. benchmarks/faults/audit.py defines the counts, benchmarks/faults/chaos_run.py the times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.faults.chaos_run import ChaosRun, report, run_chaos  # noqa: E402
from benchmarks.faults.pace import draw, pace_ratio  # noqa: E402
from benchmarks.faults.supervise import STATUS  # noqa: E402
from bus.errors import DartError  # noqa: E402 - after the path
from dart_cli.cli.up import set_aside  # noqa: E402
from dart_cli.config.load import load_config  # noqa: E402
from dart_cli.config.schema import Config  # noqa: E402
from dart_cli.runtime.commands import commands_of  # noqa: E402

ROLES = ("env", "rollout", "data", "train", STATUS)
SETTINGS = ("train.updates=1000000", "train.max_minutes=0", "train.checkpoint_every=2")
"""A trainer that is always killed before its next checkpoint makes no progress: write one often."""


def main() -> int:
    """Run, kill, audit and print; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "configs/quickstart.toml")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills, mean")
    parser.add_argument("--roles", default=",".join(ROLES), help="roles to kill")
    parser.add_argument("--control", action="store_true", help="first run the same without kills")
    parser.add_argument(
        "--picture", type=Path, help="draw both learning curves here, with --control"
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    if arguments.every <= 0:
        parser.error("--every must be above 0; --control plays without kills")
    if unknown := set(arguments.roles.split(",")) - set(ROLES):
        parser.error(f"--roles: {', '.join(sorted(unknown))} is none of {', '.join(ROLES)}")
    try:
        result = compare(arguments) if arguments.control else report(play(arguments, kills=True))
    except DartError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    result = {"benchmark": "chaos", "every_s": arguments.every, **result}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 1 if is_broken(result) else 0


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play both runs, one after the other, and compare them."""
    undisturbed = play(arguments, kills=False)
    disturbed = play(arguments, kills=True)
    calm, shaken = undisturbed.curve(), disturbed.curve()
    if arguments.picture is not None:
        draw(arguments.picture, shaken, calm, disturbed.kills_at)
    ratio = pace_ratio(shaken.trained_at, calm.trained_at)
    control = report(undisturbed)
    return {
        **report(disturbed),
        "pace_ratio": None if ratio is None else round(ratio, 4),
        "success_curve": [(batch, round(success, 4)) for batch, success in shaken.success],
        "control": {
            **{name: control[name] for name in ("seconds", "batches", "trajectories", "success")},
            "success_curve": [(batch, round(success, 4)) for batch, success in calm.success],
        },
    }


def play(arguments: argparse.Namespace, *, kills: bool) -> ChaosRun:
    """Play one run in a fresh run directory."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    overrides = ["run.dir=runs/chaos", *SETTINGS, *arguments.set]
    if not kills:
        calm_dir = load_config(arguments.config, overrides).run.dir
        overrides.append(f"run.dir={calm_dir.with_name(f'{calm_dir.name}-control')}")
    config = load_config(arguments.config, overrides)
    set_aside(config)
    say(f"{config.run.dir}: {arguments.seconds:.0f} s {'with' if kills else 'without'} kills")
    return asyncio.run(
        run_chaos(
            config,
            commands(config, arguments, overrides),
            seconds=arguments.seconds,
            every_s=arguments.every if kills else 0.0,
            roles=arguments.roles.split(","),
            seed=arguments.seed,
            say=say,
        )
    )


def commands(
    config: Config, arguments: argparse.Namespace, overrides: list[str]
) -> dict[str, list[str]]:
    """Return the commands of `dart up`, with `dart status` if it is to be killed too; the data service is last."""
    arguments_of_up = [
        str(arguments.config),
        *(part for override in overrides for part in ("--set", override)),
    ]
    role_commands = commands_of(config, arguments_of_up)
    if STATUS in arguments.roles.split(","):
        role_commands = {
            STATUS: [STATUS, *arguments_of_up, "--json", "--watch", "1"],
            **role_commands,
        }
    return role_commands


def is_broken(result: dict[str, Any]) -> bool:
    """Return True if a promise is broken."""
    lost = ("finished_lost", "double_trained", "never_trained")
    return (
        any(result[name] for name in lost)
        or result["steps_lost_max"] > 1
        or bool(result["ended_alone"])
    )


if __name__ == "__main__":
    sys.exit(main())
