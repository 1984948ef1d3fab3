"""Find virtual machines of OSWorld on this host that a killed `dart env` left running.

The next `dart env` that boots a machine here removes them. Until then each keeps its cores and memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from bus.errors import EnvError, MissingPartError
from dart_cli.config.rules import Finding
from dart_cli.runtime.findings import warning
from envs.suites.osworld.container import find_engine, left_behind

ENGINE_S = 5.0
"""Longest time of each of the two requests to the container engine."""


def guests() -> Iterator[Finding]:
    """Yield a warning that names the machines, if there are any and a container engine runs."""
    try:
        engine = find_engine(ENGINE_S)
    except MissingPartError:  # machine.programs reports it if the run needs one
        return
    try:
        names = left_behind(engine)
    except EnvError as fault:
        yield warning("guests", str(fault), "see `docker ps`")
        return
    finally:
        engine.close()
    if names:
        yield warning(
            "guests",
            f"{len(names)} virtual machine{'s' * (len(names) > 1)} left by a killed `dart env`, each with its "
            "cores and memory",
            f"docker rm --force --volumes {' '.join(names)}; the next `dart env` that boots a machine here "
            "removes them as well",
        )
