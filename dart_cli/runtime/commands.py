"""The command lines of a run's processes, as a person would type them.

commands_of  the arguments of `dart` by worker name
"""

from __future__ import annotations

from collections.abc import Sequence

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
