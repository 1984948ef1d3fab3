"""What a run asks of a cluster, and where a cluster is looked for."""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bus.errors import MissingPartError, UserError
from dart_cli.cli.main import main
from dart_cli.cluster import connection
from dart_cli.cluster.connection import connected, refuse_ray
from dart_cli.cluster.demands import Demand, Node, env_of, lacking, rollout_of, trainer_of
from dart_cli.config.schema import Config
from tests.waiting import PATIENCE_S


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def node(name: str = "a", cpus: float = 8, gpus: float = 0, **more: float) -> Node:
    return Node(name, name, name, cpus, gpus, **more)


SEVERAL = config(
    train={"ranks": 4}, rollout={"engine": "vllm"}, vllm={"tensor_parallel": 2}, up={"rollouts": 2}
)


def test_a_trainer_takes_a_gpu_for_each_rank_and_data_a_cpu_beside_it() -> None:
    trainer = trainer_of(SEVERAL, [node(gpus=8)])
    assert [bundle.bundle for bundle in trainer.bundles] == [{"CPU": 2.0, "GPU": 4.0}]
    assert trainer.ranks == (Demand("train", 1, 4),)


def test_ranks_that_fit_on_no_node_are_placed_one_by_one() -> None:
    trainer = trainer_of(SEVERAL, [node("a", gpus=2), node("b", gpus=2)])
    assert trainer.bundles == (
        Demand("data service and trainer", 2, 1),
        *(Demand(f"train-{rank}", 1, 1) for rank in (1, 2, 3)),
    )
    assert [rank.name for rank in trainer.ranks] == ["train", "train-1", "train-2", "train-3"]


def test_an_evaluation_around_the_run_gets_the_gpus_of_its_engine() -> None:
    around = SEVERAL.model_copy(
        update={
            "train": SEVERAL.train.model_copy(update={"ranks": 1}),
            "eval": SEVERAL.eval.model_copy(update={"around": True}),
        }
    )
    trainer = trainer_of(around, [node(gpus=8)])
    assert trainer.bundles == (Demand("data service and trainer", 2, 2),)
    assert (trainer.ranks, trainer.evaluation) == ((Demand("train", 1, 1),), Demand("eval", 1, 2))
    on_cpus = trainer_of(around, [node()])
    assert (on_cpus.home, on_cpus.evaluation) == (
        Demand("data service and trainer", 3),
        Demand("eval", 2),
    )


def test_on_a_cluster_without_gpus_cpus_stand_for_them() -> None:
    assert trainer_of(SEVERAL, [node()]).bundles == (Demand("data service and trainer", 5),)
    assert rollout_of(SEVERAL, "rollout-0", [node()]) == Demand("rollout-0", 2)
    assert rollout_of(SEVERAL, "rollout-0", [node(gpus=2)]) == Demand("rollout-0", 1, 2)
    assert env_of("env-0") == Demand("env-0", 1)


def test_a_process_without_a_model_asks_for_no_gpu() -> None:
    simulated = config(rollout={"engine": "scripted"}, train={"learner": "my:learner"})
    assert rollout_of(simulated, "rollout-0", [node(gpus=2)]) == Demand("rollout-0", 1)
    assert trainer_of(simulated, [node(gpus=2)]).bundles == (Demand("data service and trainer", 2),)


def test_a_wait_names_what_is_lacking() -> None:
    busy = [node("a", 4, 1, free_cpus=1), node("b", 4, 1, free_cpus=3)]
    assert lacking(Demand("rollout-2", 1, 1), busy) == (
        "waits for 1 node with 1 GPU and 1 CPU for rollout-2: the cluster has 0 of 2 GPUs and 4 of 8 CPUs "
        "free"
    )
    assert lacking(Demand("rollout-2", 1, 4), busy) == (
        "waits for 1 node with 4 GPUs and 1 CPU for rollout-2: no node of the cluster has that many, "
        "the largest of 2 has 1 GPUs and 4 CPUs"
    )


@pytest.mark.parametrize("address", ["", "host", "ray://host:1", "host:", ":1", "host:99999"])
def test_what_is_no_address_of_a_cluster_is_refused(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())  # Ray is installed
    with pytest.raises(UserError, match="want HOST:PORT"):
        refuse_ray(address)
    path = tmp_path / "c.toml"
    path.write_text("")
    with pytest.raises(SystemExit) as end:
        main(["up", str(path), "--ray", address, "--dry-run"])
    assert end.value.code == 2
    assert "want HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", None])
def test_a_port_where_something_else_listens_is_no_cluster(
    said: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REACH_S", 0.2 if said is None else PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                if said is not None:
                    peer.sendall(said)
                    return
                while peer.recv(64):
                    pass  # and never answers

        serving = threading.Thread(target=serve)
        serving.start()
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=r"no Ray cluster answers at 127\.0\.0\.1, port \d+: "):
            connection._reach(address, "127.0.0.1")
        serving.join(PATIENCE_S)


def test_an_older_run_stays_in_place_where_there_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    monkeypatch.setattr(connection, "_ray", lambda: ray)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())  # Ray is installed
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    (tmp_path / "run" / "workers").mkdir(parents=True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(SystemExit) as end:
            main(["up", str(path), "--ray", f"127.0.0.1:{port}", "--fresh"])
    assert end.value.code == 2
    assert f"no Ray cluster answers at 127.0.0.1, port {port}" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"c.toml", "run"}


def test_folders_of_local_clusters_whose_process_was_killed_are_removed(tmp_path: Path) -> None:
    with connection._own_folder(tmp_path) as held:
        left, begun = tmp_path / "dart-ray-left", tmp_path / "dart-ray-begun"
        for folder in (left, begun):
            folder.mkdir()
            (folder / "lock").touch()
        for folder in (left, held):
            os.utime(folder, (0, 0))
        with connection._own_folder(tmp_path) as made:
            assert set(tmp_path.iterdir()) == {held, begun, made}
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == [begun]


def test_a_missing_package_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    result = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else result(name)
    )
    with pytest.raises(MissingPartError), connected("local", 1):
        pass
    with pytest.raises(SystemExit) as end:
        main(["up", str(path), "--ray", "local"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: `dart up --ray` needs the package ray: pip install -e '.[ray]' in dart's folder, on every "
        "node\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_what_is_asked_for_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[train]\nranks = 2\n')
    with pytest.raises(SystemExit) as end:
        main(["up", str(path), "--ray", "10.0.0.1:6379", "--dry-run"])
    assert end.value.code in (0, None)
    printed = capsys.readouterr().out
    assert (
        "ray:       data service and trainer on one node, with a GPU for each rank (2)" in printed
    )
    assert printed.endswith("valid; nothing was started\n")
    with pytest.raises(SystemExit) as end:
        main(["up", str(path), "--ray", "there", "--dry-run"])
    assert end.value.code == 2
