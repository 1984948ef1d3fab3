"""A worker belongs to one slot, in any process."""

import os
import subprocess
import sys

import pytest

from bus.errors import EnvError
from dart_cuabench.workers import ExclusiveWorkers
from envs.tools.remote.servers import Address
from tests.examples.cuabench.worker_process import EXAMPLE

A, B = (Address("box", port) for port in (1, 2))


def test_an_worker_is_taken_once(tmp_path):
    ours, theirs = ExclusiveWorkers([A, B], tmp_path), ExclusiveWorkers([A, B], tmp_path)
    addresses = {ours.take(), theirs.take()}
    assert addresses == {A, B}
    with pytest.raises(EnvError, match=r"env\.slots"):
        ours.take()
    for servers in (ours, theirs):
        servers.give_back(A)
        servers.give_back(B)
    assert {ours.take(), ours.take()} == {A, B}
    for address in (A, B):
        ours.give_back(address)


def test_an_worker_is_free_again_when_its_process_ends(tmp_path):
    program = (
        "import sys; from pathlib import Path; from envs.tools.remote.servers import Address; "
        "from dart_cuabench.workers import ExclusiveWorkers; "
        "servers = ExclusiveWorkers([Address('box', 1)], Path(sys.argv[1])); servers.take(); "
        "print('taken', flush=True); sys.stdin.read()"
    )
    ours = ExclusiveWorkers([A], tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(EnvError):
            ours.take()
        other.communicate("")
    assert ours.take() == A
    ours.give_back(A)
