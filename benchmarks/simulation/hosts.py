"""Hosts on one machine, for benchmarks and tests: network namespaces on one bridge.

hosts     a first host and others, each with an address; they go with the block
Host      its address, and the command that runs another one there
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FIRST = "10.78.0.1"


@dataclass(frozen=True)
class Host:
    """A host: its address, and the command that runs another command there."""

    address: str
    enter: tuple[str, ...]  # from the system
    from_first: tuple[str, ...]  # from the first host


class NotPermittedError(Exception):
    """An error that says that this user may have no namespaces, or that tools for them are missing."""


@contextlib.contextmanager
def hosts(count: int, *unseen: Path) -> Iterator[list[Host]]:
    """Yield a host and `count` others, which reach one another by tcp. Raises NotPermittedError.

    From the others the folders `unseen`, if there are any, are empty, and commands begin in the root folder.
    """
    kinds = ["--net", "--mount"] if unseen else ["--net"]
    hide = "".join(f"mount -t tmpfs none {shlex.quote(str(path))} && " for path in unseen)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_hold(["unshare", "--user", "--map-root-user", "--net"]))
        inside = ("nsenter", f"--target={first}", "--user", "--preserve-credentials")
        network_hosts = [Host(FIRST, (*inside, "--net"), ())]
        _configure(
            network_hosts[0],
            "ip link set lo up && ip link add hub type bridge && ip link set hub up && "
            f"ip addr add {FIRST}/24 dev hub",
        )
        for number in range(1, count + 1):
            other = stack.enter_context(_hold([*inside, "unshare", *kinds], hide))
            address = f"10.78.0.{number + 1}"
            host = Host(
                address,
                (inside[0], f"--target={other}", *inside[2:], *kinds),
                (inside[0], f"--target={other}", *kinds),
            )
            _configure(
                network_hosts[0],
                f"ip link add port{number} type veth peer name cable netns {other} && "
                f"ip link set port{number} master hub && ip link set port{number} up",
            )
            _configure(
                host,
                f"ip link set lo up && ip addr add {address}/24 dev cable && ip link set cable up",
            )
            network_hosts.append(host)
        yield network_hosts


def _configure(host: Host, commands: str) -> None:
    process = subprocess.run(
        [*host.enter, "sh", "-c", commands], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise NotPermittedError(process.stderr.strip())


@contextlib.contextmanager
def _hold(enter: list[str], first: str = "") -> Iterator[int]:
    """Yield the id of a process in new namespaces, which keeps them."""
    try:
        process = subprocess.Popen(
            [*enter, "sh", "-c", f"{first}echo $$; exec sleep 3600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise NotPermittedError(str(error)) from None
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            assert process.stderr is not None
            raise NotPermittedError(process.stderr.read().strip())
        yield process.pid
    finally:
        process.kill()
        process.communicate()
