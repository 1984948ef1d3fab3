"""The five-process run, from one command and by hand: real processes, model, database, sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from bus.messages import Lease, LeaseRequest
from dart_cli.cli.main import main
from dart_cli.config.load import load_config
from dart_cli.data.progress import NEWEST
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.evaluation.results import read_evaluation
from dart_cli.runtime.run_dir import claim
from tests.data.parts import make_ledger, step_record, trajectory_end
from tests.simulated import SLOW
from tests.waiting import PATIENCE_S, wait_until

SUITES = Path(__file__).parents[1] / "own_suites"
CONFIG = """
[run]
dir = "{folder}/run"
[model]
path = "builtin:tiny"
[env]
suite = "{suite}:CoinSuite"
slots = 8
[rollout]
max_tokens = 20
[data]
group_size = 4
groups_per_batch = 2
max_open_groups = 8
[train]
updates = {updates}
checkpoint_every = 1
lr = 1e-4
{more}
[eval]
episodes = 2
around = {around}
"""

# Bounds, not expectations: five processes that load torch on a machine that may be busy.
pytestmark = pytest.mark.slow


def write_config(folder: Path, *, updates: int, around: bool = False, more: str = "") -> Path:
    """The configuration of a small run in `folder`."""
    path = folder / "c.toml"
    suite = SUITES / "coin_suite.py"
    around_ = str(around).lower()
    path.write_text(
        CONFIG.format(folder=folder, suite=suite, updates=updates, around=around_, more=more)
    )
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    """`dart ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-m", "dart_cli", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )


def finish(child: subprocess.Popen[str]) -> tuple[str, str]:
    """(stdout, stderr) of a child that ends by itself; killed where it does not."""
    try:
        return child.communicate(timeout=PATIENCE_S)
    finally:
        child.kill()


class Here:
    """`dart` in the test's own process, for verbs that end at once."""

    def __init__(self, streams: pytest.CaptureFixture[str]) -> None:
        self._streams = streams

    def dart(self, *arguments: object) -> tuple[int, str, str]:
        """Run `dart ARGUMENTS`; return its exit code, stdout and stderr."""
        self._streams.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        out, err = self._streams.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out, err


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


def updates_done(run_dir: Path) -> int:
    """Updates in the ledger of a run that may not have begun."""
    try:
        with open_reader(run_dir) as reader:
            return sum(batch.state == "trained" for batch in reader.batches())
    except RunDirectoryError:  # not there yet, or being made at this moment
        return 0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for another process to make something true."""
    wait_until(condition, what, every_s=0.1)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Children that are killed at the end, whatever happens."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


def test_one_command_evaluates_trains_goes_on_after_ctrl_c_and_reports(
    tmp_path: Path, children: list[subprocess.Popen[str]], here: Here
) -> None:
    path = write_config(tmp_path, updates=100_000, around=True)
    run_dir = tmp_path / "run"
    child = start("up", path)
    children.append(child)
    until(lambda: updates_done(run_dir) >= 1, "an update")

    _, out, err = here.dart("status", run_dir, "--once", "--json")
    snapshot = json.loads(out)
    assert snapshot["run_dir"].endswith("run")
    assert {process["role"] for process in snapshot["processes"]} >= {"data", "train"}, err

    code, _, err = here.dart("up", path)
    assert code == 2
    assert "up is running already" in err

    child.send_signal(signal.SIGINT)
    _, err = finish(child)
    assert child.returncode == 130, err
    assert "stopped; go on with: dart up" in err
    assert "progress: sampled 4/4 episodes" in err
    config = load_config(path)
    for worker in ("data", "train", "rollout-0", "env-0", "up"):
        with claim(config, worker, worker) as name:
            assert name == worker  # free: no process is left

    done = updates_done(run_dir)
    again = ("up", path, "--set", f"train.updates={done + 2}")
    child = start(*again)
    children.append(child)
    out, err = finish(child)
    assert child.returncode == 0, err
    assert updates_done(run_dir) == done + 2
    result = json.loads(out.splitlines()[-1])
    assert result["policy_version"] >= done + 2
    assert result["trajectories"] >= (done + 2) * 8
    assert result["run_dir"] == str(run_dir)
    assert result["minutes"] <= result["minutes_total"]
    for key in ("success_before", "success_after", "greedy_before", "greedy_after"):
        assert 0 <= result[key] <= 1
    assert set(result["per_task"]["coin/throw"]) >= {"before", "after"}
    assert set(result["heldout"]["per_task"]) == {"coin/again"}
    after = read_evaluation(run_dir, "after")
    assert after is not None
    for name in ("curve", "films"):
        assert Path(result[name]).read_bytes().startswith(b"\x89PNG")
    assert "update" in err
    assert "progress: sampled 4/4 episodes" in err
    for name in ("data", "train", "rollout-0", "env-0", "eval"):
        assert f"{name} | " in (run_dir / "logs" / "up.log").read_text()
        assert (run_dir / "logs" / f"{name}.log").exists()

    code, _, err = here.dart(*again, "--set", "model.path=builtin:small")
    assert code == 2
    assert "set it back, choose another run.dir" in err

    # The run is over: again means only the report again; --fresh moves it aside and begins anew.
    code, out, err = here.dart(*again)
    assert code == 0, err
    assert "updates are done; --fresh begins anew" in err
    assert "held-out episodes" not in err  # both evaluations were made
    result_again = json.loads(out.splitlines()[-1])
    assert result_again["trajectories"] == result["trajectories"]
    assert result_again["success_after"] == result["success_after"]


def without_a_model(path: Path) -> None:
    """Make a configuration of `write_config` answer at random and learn nothing."""
    text = path.read_text().replace("[rollout]", '[rollout]\nengine = "scripted"')
    path.write_text(text.replace("[train]", f'[train]\nlearner = "{SLOW}"'))


def test_a_run_that_has_learned_ends_is_evaluated_and_is_not_gone_on_with(
    tmp_path: Path, children: list[subprocess.Popen[str]], here: Here
) -> None:
    """Without a model: what one learns is for other tests. All but the last of the trajectories are there."""
    path = write_config(tmp_path, updates=100_000, around=True)
    without_a_model(path)
    stop_at = "train.stop_at=0.001"
    learned = ("up", path, "--set", stop_at)
    config = load_config(path, [stop_at])
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(NEWEST - 100):
            request = LeaseRequest(worker="env-0", slot=0, suites=[config.env.suite])
            lease = ledger.lease(request)
            assert isinstance(lease, Lease)
            ledger.step(step_record(lease.trajectory_id, 0))
            ledger.end(trajectory_end(lease.trajectory_id, 1, "pass"))
    children.append(start(*learned))
    out, err = finish(children[0])
    assert err.count("learned: success is at least") == 1, err
    result = json.loads(out.splitlines()[-1])
    assert 0 < result["updates"] < 100_000
    assert 0.001 <= result["stopped_at"] < 1
    assert result["note"] == ""
    assert result["success_after"] is not None
    code, _, err = here.dart(*learned)
    assert code == 0
    assert "train.stop_at = 0 goes on" in err
    assert updates_done(tmp_path / "run") == result["updates"]


def test_four_shells_in_any_order_each_stopped_once_reach_the_same_end(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    """Without a model: how trainer and engine go on with theirs is for the tests above."""
    updates = 16
    path = write_config(tmp_path, updates=updates)
    without_a_model(path)
    run_dir = tmp_path / "run"
    roles = {}

    def begin(role: str) -> None:
        roles[role] = start(role, path)
        children.append(roles[role])

    def stop(role: str) -> None:
        roles[role].send_signal(signal.SIGINT)
        _, err = finish(roles[role])
        assert roles[role].returncode == 0, f"{role}: {err}"

    for role in ("env", "train", "rollout", "data"):
        begin(role)
    for role in ("rollout", "data", "env", "train"):
        before = updates_done(run_dir)
        until(lambda seen=before: updates_done(run_dir) > seen, f"an update before {role} stops")
        assert roles[role].poll() is None, "the run ended before every process was stopped once"
        stop(role)
        begin(role)
    for role, child in roles.items():
        _, err = finish(child)
        assert child.returncode == 0, f"{role}: {err}"
    assert updates_done(run_dir) == updates
    with open_reader(run_dir) as reader:
        trained = [group for batch in reader.batches() for group in reader.batch_groups(batch.id)]
    assert len(trained) == len(set(trained)) == updates * 2


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row; tests beside us begin to look elsewhere."""
    places = range(20_000, 30_000, count)
    for step in range(len(places)):
        first = places[(os.getpid() + step) % len(places)]
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def test_a_run_over_tcp_answers_only_those_with_its_keys(
    tmp_path: Path, children: list[subprocess.Popen[str]], here: Here
) -> None:
    path = write_config(tmp_path, updates=1)
    for name in ("ours", "theirs"):
        assert here.dart("keys", tmp_path / name)[0] == 0
    tcp = ["--set", "bus.host=127.0.0.1", "--set", f"bus.port={free_ports(3)}"]
    ours = ("--set", f"bus.keys={tmp_path}/ours")
    children.append(start("data", path, *tcp, *ours))
    until((tmp_path / "run" / "config.json").exists, "dart data")
    _, out, err = here.dart("status", path, "--once", "--json", *tcp, *ours)
    assert json.loads(out)["updates"] == 0, err
    for keys in (["--set", f"bus.keys={tmp_path}/theirs"], []):
        code, _, err = here.dart("status", path, "--once", *tcp, *keys)
        assert code == 1
        assert "no data service answers" in err
