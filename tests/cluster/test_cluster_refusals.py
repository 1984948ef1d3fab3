"""What a run asks of a cluster first, which keys it uses, and what it says of the cluster; without Ray."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bus.endpoints import make_private_dir, write_key_pair
from bus.errors import DartError
from dart_cli.cluster import cluster_run
from dart_cli.cluster.cluster_run import NO_TOKEN, ClusterRun
from dart_cli.cluster.demands import Demand, Node
from dart_cli.cluster.placing import NodeLostError, Place
from dart_cli.config.load import load_config
from dart_cli.runtime.supervisor import RESTARTS

BOX = Node("1", "box", "127.0.0.1", cpus=8, gpus=8, free_cpus=8, free_gpus=8)
CONFIG = """
[run]
dir = "{folder}/run"
[rollout]
engine = "vllm"
[vllm]
tensor_parallel = 2
[up]
envs = 1
rollouts = 2
[eval]
around = true
"""


class RayError(Exception):
    """As Ray's."""


class RayActorError(RayError):
    """As Ray's, of an actor that is lost."""


class Placed:
    """Places as they are asked for; each process has one at once."""

    def __init__(self, *_: object) -> None:
        self.asked: list[str] = []
        self.demands: dict[str, Demand] = {}
        self.error: RayError | None = None  # what actors answer
        self.is_home_lost = False

    async def reserve(self, bundles: Sequence[Demand], on: Node | None = None) -> str:
        self.asked += [f"bundle of {each.name}" for each in bundles]
        return self.asked[-1]

    def place(
        self, demand: Demand, worker: str, reserved: Any = None, index: int = 0
    ) -> SimpleNamespace:
        self.asked.append(f"{worker} in {reserved}")
        self.demands[worker] = demand
        ports = SimpleNamespace(remote=lambda *_: SimpleNamespace(future=self._answer))
        return SimpleNamespace(node=BOX, demand=demand, actor=SimpleNamespace(ports=ports))

    def _answer(self) -> concurrent.futures.Future[int]:
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()
        if self.error is None:
            answer.set_result(20_000)
        else:
            answer.set_exception(self.error)
            self.error = None
        return answer

    async def wait_for(self, place: Place, *_: object) -> bool:
        if self.is_home_lost and self.error is None:
            raise NodeLostError("the node box is lost")
        return True

    async def remove(self, places: Sequence[Place]) -> None:
        pass


class Cluster:
    """One node, which this is."""

    here, is_local, has_token = "1", False, True
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError, RayActorError=RayActorError)
    )

    def nodes(self) -> list[Node]:
        return [BOX]

    async def ask(self, call: Any) -> Any:
        return call()


def run_of(tmp_path: Path, overrides: Sequence[str] = ()) -> tuple[ClusterRun, Placed, list[str]]:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    messages: list[str] = []
    made = ClusterRun(Cluster(), load_config(path, list(overrides)), path, messages.append)  # type: ignore[arg-type]
    placing = made._placing
    assert isinstance(placing, Placed)
    return made, placing, messages


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_run, "Placing", Placed)


async def test_gpus_are_reserved_before_any_environment_takes_a_cpu(tmp_path: Path) -> None:
    made, placing, output = run_of(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / ".cluster-of-one-that-was-killed").touch()
    assert await made.settle([], asyncio.Event())
    for name in ("env-0", "rollout-1", "eval", "train", "rollout-0"):
        await made._place_of(name)
    home, first, second = (
        f"bundle of {name}" for name in ("data service and trainer", "rollout-0", "rollout-1")
    )
    assert placing.asked == [
        *(home, f"data in {home}", first, second, "env-0 in None", f"rollout-1 in {second}"),
        *(f"eval in {home}", f"train in {home}", f"rollout-0 in {first}"),
    ]
    assert (placing.demands["eval"].gpus, placing.demands["train"].gpus) == (2, 1)
    assert output == ["data service and trainer run on this host, port 20000"]
    assert [path.name for path in (tmp_path / "run").glob(".cluster-*")] == [made._marker]


async def test_ranks_on_several_nodes_whose_home_is_lost_end_the_run_with_a_line(
    tmp_path: Path,
) -> None:
    made, placing, _ = run_of(tmp_path, ["train.ranks=9"])
    await made.settle(["train.ranks=9"], asyncio.Event())
    placing.error, placing.is_home_lost = RayActorError("its node is gone"), True
    with pytest.raises(
        DartError, match=r"the node box .* which ran data service and trainer, is lost"
    ):
        await made.start("train", [], asyncio.Event())


async def test_an_actor_that_is_lost_at_each_start_ends_the_run_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts it again for ever: it is dart that stops."""
    made, _, _ = run_of(tmp_path)
    await made.settle([], asyncio.Event())
    starts, lasts = 0, 0

    async def started(*_: object) -> str:
        nonlocal starts
        starts += 1
        if starts > lasts:
            return "a process"
        raise RayActorError("The actor died.\n  File x\nOSError: it was killed\n")

    monkeypatch.setattr(made, "_start_at", started)
    lasts = RESTARTS
    for _ in range(2):  # nothing is remembered of an earlier start
        starts = 0
        assert await made.start("env-0", [], asyncio.Event()) == "a process"
    starts, lasts = 0, RESTARTS + 1
    with pytest.raises(DartError, match=r"env-0: Ray lost its actor 4 times .*it was killed"):
        await made.start("env-0", [], asyncio.Event())


async def test_what_ray_cannot_do_is_one_line(tmp_path: Path) -> None:
    made, placing, _ = run_of(tmp_path, ["train.ranks=9"])
    await made.settle(["train.ranks=9"], asyncio.Event())
    placing.error = RayError("ray::RoleHost.ports()\n  File x, line 1\nOSError: no more files\n")
    with pytest.raises(DartError, match=r"^train: Ray cannot start it: OSError: no more files$"):
        await made.start("train", [], asyncio.Event())


async def test_a_cluster_that_asks_for_no_token_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "has_token", False)
    made, _, output = run_of(tmp_path)
    await made.settle([], asyncio.Event())
    assert output[0] == NO_TOKEN


async def test_the_processes_have_the_variables_that_the_page_on_boxes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "box.md").read_text(encoding="utf-8")
    [listed] = re.findall(r"that begin with ([A-Z_, ]+) or (\w+),", " ".join(page.split()))
    named = {f"{each.strip()}X" for part in listed for each in part.split(",")}
    assert len(named) == 7
    named |= {"OMP_NUM_THREADS", "no_proxy", "PYTORCH_ALLOC_CONF"}
    for name in (*named, "SECRET", "AWS_KEY"):
        monkeypatch.setenv(name, "1")
    made, _, _ = run_of(tmp_path)
    await made.settle([], asyncio.Event())
    place = await made._place_of("rollout-0")
    passed = made._setup("rollout-0", place)["environment"]
    assert named <= passed.keys()
    assert not {"SECRET", "AWS_KEY", "PATH", "CUDA_VISIBLE_DEVICES"} & passed.keys()


async def test_keys_of_the_users_own_stay_wherever_they_are(tmp_path: Path) -> None:
    for folder in (tmp_path / "run" / "keys", tmp_path / "keys"):
        make_private_dir(folder)
        write_key_pair(folder / "curve.json")
        text = (folder / "curve.json").read_text()
        overrides = [f"bus.keys={folder}", "bus.host=127.0.0.1"]
        made, _, _ = run_of(tmp_path, overrides)
        await made.settle(overrides, asyncio.Event())
        assert (folder / "curve.json").read_text() == text
        assert (tmp_path / "run" / "keys" / "curve.json").read_text() == text
