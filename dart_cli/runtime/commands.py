"""The command lines of a run's processes, as a person would type them.

commands_of  the arguments of `dart` by worker name
gpu_lines    which GPUs the trainer and each rollout worker get: `python -m dart_cli.runtime.commands
             CONFIG --set ...` prints them for scripts/tmux.sh
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bus.errors import ConfigError, DartError
from dart_cli.config.devices import gpu_mistakes, gpus_of
from dart_cli.config.load import Source, load_config
from dart_cli.config.schema import Config


def commands_of(config: Config, arguments: Sequence[str]) -> dict[str, list[str]]:
    """The processes of the run by name; data last, as the others talk to it until they end."""
    commands = {}
    for role, count in (("env", config.up.envs), ("rollout", config.up.rollouts)):
        for index in range(count):
            name = f"{role}-{index}"
            commands[name] = [role, *arguments, "--worker", name]
    commands["train"] = ["train", *arguments]
    commands["data"] = ["data", *arguments]
    return commands


def gpu_lines(config: Config) -> list[str]:
    """`train 0,1` and `rollout 2` for each worker, of those that [gpus] names."""
    names = ["train"] if config.gpus.train else []
    if config.gpus.rollout:
        names += [f"rollout-{index}" for index in range(config.up.rollouts)]
    roles = [name.partition("-")[0] for name in names]
    return [
        f"{role} {gpus_of(config, role, name)}" for role, name in zip(roles, names, strict=True)
    ]


def _main(path: Path, overrides: list[str]) -> int:
    try:
        config = load_config(path, overrides)
        for key, text in gpu_mistakes(config):
            raise ConfigError(f"{key} {text} {Source(path, tuple(overrides)).cite(key)}")
    except DartError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return error.exit_code
    sys.stdout.writelines(f"{line}\n" for line in gpu_lines(config))
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), [each for each in sys.argv[2:] if each != "--set"]))
