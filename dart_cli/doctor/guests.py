"""Virtual machines of OSWorld on this host whose `dart env` was killed.

The next `dart env` that boots a machine here removes them. Where none comes, each keeps its cores and memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from bus.errors import EnvError, MissingPartError
from dart_cli.config.rules import Finding
from dart_cli.runtime.findings import warning
from envs.suites.osworld.container import find_engine, left_behind

ENGINE_S = 5.0
"""Longest time of a request to the container engine; there are two."""


def guests() -> Iterator[Finding]:
    """Yield a warning that names the machines; nothing where no container engine runs."""
    try:
        engine = find_engine(ENGINE_S)
    except MissingPartError:  # `programs` says it where the run needs one
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
            f"{len(names)} virtual machine{'s' * (len(names) > 1)} of a `dart env` that was killed, each with its "
            "cores and memory",
            f"docker rm --force --volumes {' '.join(names)}; the next `dart env` that boots a machine here "
            "removes them as well",
        )
