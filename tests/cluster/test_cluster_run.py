"""`dart up --ray` on a cluster of three nodes: it completes, loses a node, is stopped, lacks room."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from benchmarks.faults.audit import FinishedTrajectories, audit
from benchmarks.faults.local_nodes import local_cluster
from bus.errors import RunDirectoryError
from dart_cli.config.endpoints import run_endpoints
from dart_cli.data.store.open import open_reader
from dart_cli.runtime.run_dir import read_run
from tests.cluster.parts import Runs, write_config
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
]
"""On a busy machine Ray may give up a worker that it starts after a minute, and start another."""


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """Room for data and train on the first node, for all others on each of the rest."""
    with local_cluster({"num_cpus": 2}, {"num_cpus": 2}, {"num_cpus": 2}) as made:
        runs = Runs(made)
        try:
            yield runs
        finally:
            runs.end()


def updates_done(run_dir: Path) -> int:
    try:
        with open_reader(run_dir) as reader:
            return sum(batch.state == "trained" for batch in reader.batches())
    except RunDirectoryError:
        return 0


def trainer_of(run_dir: Path) -> psutil.Process:
    """The trainer that started last."""
    pids = re.findall(r"train starts, pid (\d+)", (run_dir / "logs" / "train.log").read_text())
    return psutil.Process(int(pids[-1]))


def processes_of(folder: Path) -> list[int]:
    """Processes of `dart`, of a run below `folder`, also those on the nodes."""
    results = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "dart_cli" in words and any(str(folder) in word for word in words):
                results.append(process.pid)
    return results


def test_ctrl_c_leaves_no_process_and_the_run_goes_on_though_a_node_is_lost(
    runs: Runs, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    path = write_config(tmp_path, updates=10_000)
    stopped = runs.up(path)
    wait_until(lambda: updates_done(run_dir) >= 1, "an update")
    assert len(processes_of(tmp_path)) >= 5
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == 130, err
    assert f"go on with: dart up {path} --ray {runs.cluster.address}" in err
    assert processes_of(tmp_path) == []

    config = read_run(run_dir)  # as `dart status RUN` does
    assert config.bus.keys is not None
    assert run_endpoints(config).address("data").startswith("tcp://127.0.0.1:")
    for name in ("data", "train", "rollout-0", "env-0"):
        assert f"{name} starts, pid" in (run_dir / "logs" / f"{name}.log").read_text()

    done = updates_done(run_dir)
    last = done + 40
    child = runs.up(path, "--set", f"train.updates={last}")
    finished, text = FinishedTrajectories(), []

    def listen() -> None:
        assert child.stderr is not None
        text.extend(child.stderr)

    listening = threading.Thread(target=listen)
    listening.start()
    wait_until(lambda: updates_done(run_dir) >= done + 2, "more updates")
    train = trainer_of(run_dir)
    train.suspend()  # or the last updates may be done before the loss is seen
    assert updates_done(run_dir) < last
    with open_reader(run_dir) as reader:
        finished.update(reader)

    def workers() -> list[re.Match[str]]:
        matches = (re.search(r"(\S+) runs on .* node (\w+)", line) for line in list(text))
        return [match for match in matches if match is not None]

    placed = {"rollout-0", "env-0"}
    wait_until(lambda: {match[1] for match in workers()} == placed, "the lines of both workers")
    runs.cluster.kill(workers()[0][2])  # the node of one of them, at least
    wait_until(
        lambda: any("; starting it again (1/3)" in line for line in text),
        "a process that starts again",
    )
    train.resume()
    child.wait(PATIENCE_S)
    listening.join()
    assert child.returncode == 0, "".join(text)
    assert updates_done(run_dir) == last
    with open_reader(run_dir) as reader, (run_dir / "logs" / "train.log").open() as log:
        result = audit(reader, finished, log)
    assert (result.finished_lost, result.double_trained, result.never_trained) == (0, 0, 0)
    assert result.trajectories >= last * 8
    assert processes_of(tmp_path) == []
