"""What each process of a run asks of a cluster, and what a cluster lacks for it.

Node, Demand   what a node has; what a process asks for, on one node
Trainer        the data process and the trainer: on one node, or its ranks over several
trainer_of, rollout_of, env_of   the demands of a configuration
demands_of     all that a run asks for
lacking        one line: what is waited for
summary        one line: what a run will ask for, on nodes that are not known yet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dart_cli.config.devices import gpus_per_worker
from dart_cli.config.schema import MODEL_ENGINES, Config

HOME = "data and train"
"""The demand of the data process and the trainer, which share a node."""


@dataclass(frozen=True)
class Node:
    """A living node of the cluster."""

    id: str
    host: str
    address: str  # as the other nodes reach it
    cpus: float = 0.0
    gpus: float = 0.0
    free_cpus: float = 0.0
    free_gpus: float = 0.0

    def holds(self, demand: Demand) -> bool:
        """Whether all of it is enough."""
        return self.cpus >= demand.cpus and self.gpus >= demand.gpus

    def has_free(self, demand: Demand) -> bool:
        """Whether what is free is enough."""
        return self.free_cpus >= demand.cpus and self.free_gpus >= demand.gpus


@dataclass(frozen=True)
class Demand:
    """What one process asks for; all of it on one node."""

    name: str
    cpus: int
    gpus: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray names resources."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


@dataclass(frozen=True)
class Trainer:
    """The bundles of the trainer: the first one holds the data process too, and evaluations."""

    bundles: tuple[Demand, ...]
    ranks: tuple[Demand, ...]
    """What each process that Ray starts for the trainer asks for; one starts its own ranks itself."""
    evaluation: Demand

    @property
    def home(self) -> Demand:
        """The bundle of the data process, and in turn of rank 0 and an evaluation."""
        return self.bundles[0]


def trainer_of(config: Config, nodes: Sequence[Node]) -> Trainer:
    """All ranks on one node where one is large enough; else each rank by itself, over several."""
    ranks = config.train.ranks
    on_gpus = config.train.learner == "torch" and _on_gpus(config.train.device, nodes)
    train = Demand("train", 1 if on_gpus else ranks, ranks if on_gpus else 0)
    # It has an engine of its own, in one process.
    evaluation = rollout_of(config, "eval", nodes) if config.eval.around else Demand("eval", 1)
    whole = _home_of(train, evaluation)
    if ranks == 1 or not nodes or any(node.holds(whole) for node in nodes):
        return Trainer((whole,), (train,), evaluation)
    first = Demand("train", 1, int(on_gpus))
    others = tuple(Demand(f"train-{rank}", 1, first.gpus) for rank in range(1, ranks))
    return Trainer((_home_of(first, evaluation), *others), (first, *others), evaluation)


def _home_of(*turns: Demand) -> Demand:
    """Return a CPU for data, and what the largest of these takes, of which one runs at a time."""
    return Demand(HOME, 1 + max(each.cpus for each in turns), max(each.gpus for each in turns))


def rollout_of(config: Config, name: str, nodes: Sequence[Node]) -> Demand:
    """Return a rollout worker: the GPUs of its tensor parallel group on one node, or as many CPUs."""
    each = gpus_per_worker(config)
    if config.rollout.engine not in MODEL_ENGINES:
        return Demand(name, 1)
    if _on_gpus(config.rollout.device, nodes):
        return Demand(name, 1, each)
    return Demand(name, each)


def env_of(name: str) -> Demand:
    """Return a `dart env` process."""
    return Demand(name, 1)


def demands_of(config: Config, nodes: Sequence[Node]) -> list[Demand]:
    """All that the run asks for."""
    rollouts = (
        rollout_of(config, f"rollout-{index}", nodes) for index in range(config.up.rollouts)
    )
    envs = (env_of(f"env-{index}") for index in range(config.up.envs))
    return [*trainer_of(config, nodes).bundles, *rollouts, *envs]


def _on_gpus(device: str, nodes: Sequence[Node]) -> bool:
    """Whether a device of a configuration is a GPU; on a cluster without one, CPUs stand for GPUs."""
    return device.startswith("cuda") or (device == "auto" and any(node.gpus for node in nodes))


def summary(config: Config) -> str:
    """Return the demands in words: `data and train on one node, with a GPU for each rank (4); ...`."""
    ranks, each = config.train.ranks, gpus_per_worker(config)
    return (
        f"data and train on one node, with a GPU for each rank ({ranks}); {config.up.rollouts} rollout "
        f"workers of {each} GPU{'' if each == 1 else 's'}; {config.up.envs} dart env of 1 CPU; on a "
        "cluster without GPUs, CPUs stand for them"
    )


def lacking(demand: Demand, nodes: Sequence[Node]) -> str:
    """Return what a demand waits for, and what the nodes have, in words.

    `waits for 1 node with 1 GPU and 1 CPU for rollout-2: the cluster has 0 of 2 GPUs and 3 of 8
    CPUs free`.
    """
    wanted = " and ".join(
        f"{number} {unit}{'' if number == 1 else 's'}"
        for number, unit in ((demand.gpus, "GPU"), (demand.cpus, "CPU"))
        if number
    )
    told = f"waits for 1 node with {wanted} for {demand.name}: "
    if not any(node.holds(demand) for node in nodes):
        most = max(nodes, key=lambda node: (node.gpus, node.cpus), default=Node("", "", ""))
        has = f"the largest of {len(nodes)} has {most.gpus:g} GPUs and {most.cpus:g} CPUs"
        return f"{told}no node of the cluster has that many, {has}"
    units = [("CPU", sum(n.free_cpus for n in nodes), sum(n.cpus for n in nodes))]
    if demand.gpus:
        units.insert(0, ("GPU", sum(n.free_gpus for n in nodes), sum(n.gpus for n in nodes)))
    free = " and ".join(f"{free:g} of {whole:g} {unit}s" for unit, free, whole in units)
    return f"{told}the cluster has {free} free"
