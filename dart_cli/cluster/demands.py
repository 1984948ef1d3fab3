"""Compute what each process of a run asks of a cluster, and what a cluster lacks for it.

Node           the resources of a node
Demand         the resources that a process asks for, on one node
Trainer        the demands of the data process and the trainer: on one node, or ranks over several nodes
trainer_of, rollout_of, env_of   return the demands of a configuration's processes
demands_of     returns all demands of a run
lacking        returns in one line what a demand waits for
summary        returns in one line what a run will ask for, before the nodes are known
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dart_cli.config.devices import gpus_per_worker
from dart_cli.config.schema import MODEL_ENGINES, Config

HOME = "data service and trainer"
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
        """Return True if the whole node is large enough for a demand."""
        return self.cpus >= demand.cpus and self.gpus >= demand.gpus

    def has_free(self, demand: Demand) -> bool:
        """Return True if the free part of the node is large enough for a demand."""
        return self.free_cpus >= demand.cpus and self.free_gpus >= demand.gpus


@dataclass(frozen=True)
class Demand:
    """The resources that one process asks for, all of them on one node."""

    name: str
    cpus: int
    gpus: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """The demand as Ray's resources."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


@dataclass(frozen=True)
class Trainer:
    """The demands of the trainer.

    The first bundle also has room for the data process, and for evaluations.
    """

    bundles: tuple[Demand, ...]
    ranks: tuple[Demand, ...]
    """The demand of each process that Ray starts for the trainer. A single process starts its ranks itself."""
    evaluation: Demand

    @property
    def home(self) -> Demand:
        """The bundle of the data process, which rank 0 and an evaluation use in turn."""
        return self.bundles[0]


def trainer_of(config: Config, nodes: Sequence[Node]) -> Trainer:
    """Return the trainer's demands: all ranks on one node if one is large enough, else one bundle each."""
    ranks = config.train.ranks
    on_gpus = config.train.learner == "torch" and _on_gpus(config.train.device, nodes)
    train = Demand("train", 1 if on_gpus else ranks, ranks if on_gpus else 0)
    # An evaluation has its own engine, in one process.
    evaluation = rollout_of(config, "eval", nodes) if config.eval.around else Demand("eval", 1)
    whole = _home_of([train, evaluation])
    if ranks == 1 or not nodes or any(node.holds(whole) for node in nodes):
        return Trainer((whole,), (train,), evaluation)
    first = Demand("train", 1, int(on_gpus))
    others = tuple(Demand(f"train-{rank}", 1, first.gpus) for rank in range(1, ranks))
    return Trainer((_home_of([first, evaluation]), *others), (first, *others), evaluation)


def _home_of(turns: Sequence[Demand]) -> Demand:
    """Return one CPU for the data process, and room for the largest of `turns`, which run in turn."""
    cpus, gpus = max(turn.cpus for turn in turns), max(turn.gpus for turn in turns)
    return Demand(HOME, 1 + cpus, gpus)


def rollout_of(config: Config, name: str, nodes: Sequence[Node]) -> Demand:
    """Return the demand of a rollout worker: the GPUs of its tensor parallel group, or as many CPUs."""
    per_worker = gpus_per_worker(config)
    if config.rollout.engine not in MODEL_ENGINES:
        return Demand(name, 1)
    if _on_gpus(config.rollout.device, nodes):
        return Demand(name, 1, per_worker)
    return Demand(name, per_worker)


def env_of(name: str) -> Demand:
    """Return the demand of a `dart env` process."""
    return Demand(name, 1)


def demands_of(config: Config, nodes: Sequence[Node]) -> list[Demand]:
    """Return all demands of a run."""
    rollouts = (
        rollout_of(config, f"rollout-{index}", nodes) for index in range(config.up.rollouts)
    )
    envs = (env_of(f"env-{index}") for index in range(config.up.envs))
    return [*trainer_of(config, nodes).bundles, *rollouts, *envs]


def _on_gpus(device: str, nodes: Sequence[Node]) -> bool:
    """Return True if a configured device is a GPU. On a cluster without GPUs, CPUs replace them."""
    return device.startswith("cuda") or (device == "auto" and any(node.gpus for node in nodes))


def summary(config: Config) -> str:
    """Return all demands in words, for nodes that are not known yet."""
    ranks, per_worker = config.train.ranks, gpus_per_worker(config)
    return (
        f"data service and trainer on one node, with a GPU for each rank ({ranks}); {config.up.rollouts} rollout "
        f"workers of {per_worker} GPU{'' if per_worker == 1 else 's'}; {config.up.envs} dart env of 1 CPU; on a "
        "cluster without GPUs, CPUs replace them"
    )


def lacking(demand: Demand, nodes: Sequence[Node]) -> str:
    """Return in words what a demand waits for, and what the nodes have.

    Example: `waits for 1 node with 1 GPU and 1 CPU for rollout-2: the cluster has 0 of 2 GPUs and 3 of 8
    CPUs free`.
    """
    resources = " and ".join(
        f"{number} {unit}{'' if number == 1 else 's'}"
        for number, unit in ((demand.gpus, "GPU"), (demand.cpus, "CPU"))
        if number
    )
    wait = f"waits for 1 node with {resources} for {demand.name}: "
    if not any(node.holds(demand) for node in nodes):
        most = max(nodes, key=lambda node: (node.gpus, node.cpus), default=Node("", "", ""))
        has = f"the largest of {len(nodes)} has {most.gpus:g} GPUs and {most.cpus:g} CPUs"
        return f"{wait}no node of the cluster has that many, {has}"
    units = [("CPU", sum(n.free_cpus for n in nodes), sum(n.cpus for n in nodes))]
    if demand.gpus:
        units.insert(0, ("GPU", sum(n.free_gpus for n in nodes), sum(n.gpus for n in nodes)))
    free = " and ".join(f"{free:g} of {whole:g} {unit}s" for unit, free, whole in units)
    return f"{wait}the cluster has {free} free"
