"""What a run would do, without starting it: `--dry-run`.

describe   a configuration's consequences as (subject, text) lines
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from bus.endpoints import DATA
from bus.errors import ModelError
from bus.loopback import is_loopback
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.families import FAMILIES
from dart_cli.config.family_values import origins, told
from dart_cli.config.model_tensors import parameter_count
from dart_cli.config.models import BUILTIN, model_folder
from dart_cli.config.rate import rate_origin
from dart_cli.config.schema import (
    BY_TRACKER,
    Config,
    DataConfig,
    JudgeConfig,
    PolicyConfig,
    ServeConfig,
    TrainConfig,
)
from dart_cli.config.task_split import composed_tasks, training_tasks
from dart_cli.config.unread import unread

if TYPE_CHECKING:
    from bus.messages import Role


def describe(config: Config, role: Role | None = None) -> list[tuple[str, str]]:
    """(subject, text) lines for one role, or (None) for all of `dart up`."""
    lines = [*_everywhere(config)]
    if role in (None, "env", "serve", "data", "eval"):
        lines += _tasks(config)
    if role in (None, "rollout", "train", "eval"):
        lines.append(("model", _model(config)))
    if role in (None, "env", "rollout", "train", "eval"):
        lines.append(("prompts", _prompts(config.policy)))
        lines += _family(config)
    if role in (None, "env"):
        processes = f"{_processes(config.up.envs)} x " if role is None else ""
        lines.append(("env", f"{processes}{config.env.slots} slots"))
    if role in (None, "env", "eval") and config.env.judge is not None:
        lines.append(("judge", _judge(config.env.judge)))
    if role == "serve" or (role is None and config.up.serve):
        lines.append(("serve", _serve(config.serve)))
    if role in (None, "rollout"):
        processes = f"{_processes(config.up.rollouts)}: " if role is None else ""
        lines.append(("rollout", processes + _rollout(config)))
    if role in (None, "data"):
        lines.append(("data", _data(config)))
    if role in (None, "train"):
        lines.append(("train", _train(config)))
    if role == "eval" or (role is None and config.eval.around):
        lines.append(("eval", _eval(config)))
    without = ", ".join(f"{key} (only with {reader})" for key, reader in unread(config))
    if without:
        lines.append(("warning", f"no effect: {without}"))
    return lines


def _judge(judge: JudgeConfig) -> str:
    whose = f" at {judge.url}" if judge.url else f" on {judge.device}"
    beside = ", and an opinion beside every evaluator" if judge.use == "check" else ""
    return (
        f"{judge.model}{whose}, {judge.images} screens of up to {judge.image_size} pixels, "
        f"{judge.concurrent} episodes at once: the verdict of tasks without an evaluator{beside}"
    )


def _serve(serve: ServeConfig) -> str:
    token = "" if is_loopback(serve.host) else ", with a token"
    port = serve.port or "any free one"
    return f"{serve.host}, port {port}{token}: up to {serve.sessions} episodes at once"


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _everywhere(config: Config) -> Iterator[tuple[str, str]]:
    state = "continues the run in it" if config.run.dir.exists() else "new"
    yield "run", f"{config.run.dir} ({state}), seed {config.run.seed}"
    if config.bus.transport == "tcp":
        endpoints = run_endpoints(config)
        keys = f"keys of {config.bus.keys}" if config.bus.keys else "loopback, no keys"
        yield "bus", f"data at {endpoints.address(DATA)} and the two ports above ({keys})"
    else:
        yield "bus", f"ipc sockets in {config.run.dir / 'sock'}"


def _tasks(config: Config) -> Iterator[tuple[str, str]]:
    suite = config.env.suite
    trained = [task.id for task in training_tasks(config)]
    heldout = [task.id for task in composed_tasks(config)]
    yield "tasks", f"{len(trained)} of {suite}: {_some(trained)}"
    yield "held out", f"{len(heldout)}, never trained on: {_some(heldout)}"


def _some(names: list[str], limit: int = 6) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"


def _model(config: Config) -> str:
    if config.model.path in BUILTIN:
        return f"{config.model.path}, {config.model.dtype}"
    try:
        count = parameter_count(model_folder(config.model.path))
    except ModelError:  # a role that loads it refuses it; this one does not
        count = 0
    size = f", {count / 1e9:.2f} billion parameters" if count else ""
    return f"{config.model.path}, {config.model.dtype}{size}"


def _prompts(policy: PolicyConfig) -> str:
    turns = f"the text of {_count(policy.history_turns, 'past turn')}"
    if policy.history == "slide":
        return f"history slide: the newest {_count(policy.history_images, 'screen')}, {turns}"
    return (
        f"history evict: up to {policy.history_images_most} screens, then the newest "
        f"{policy.history_images}, {turns}"
    )


def _family(config: Config) -> Iterator[tuple[str, str]]:
    name = config.policy.family
    if name in FAMILIES:
        yield "family", f"{name}: {FAMILIES[name].title}"
        for each in origins(config):
            yield f"policy.{each.key}", told(each)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _rollout(config: Config) -> str:
    rollout = config.rollout
    device = rollout.device
    if config.gpus.rollout:
        device += f", GPU {', '.join(map(str, config.gpus.rollout))}"
    return (
        f"{rollout.engine} on {device}, up to {rollout.max_batch} requests together, "
        f"{rollout.max_tokens} tokens each at temperature {rollout.temperature:g}"
    )


def _data(config: Config) -> str:
    data = config.data
    what = "trajectories" if data.group_size == 1 else "groups"
    return (
        f"{_batch(data)} a batch, "
        f"at most {_groups_in_flight(config)} {what} in flight, "
        f"staleness up to {data.max_staleness}; {_scheduling(config)}; {_sync(config)}; "
        f"{_curation(data)}"
    )


def _batch(data: DataConfig) -> str:
    trajectories = data.groups_per_batch * data.group_size
    if data.group_size == 1:
        return f"no groups, {trajectories} trajectories"
    return (
        f"groups of {data.group_size}, {data.groups_per_batch} groups ({trajectories} trajectories)"
    )


def _groups_in_flight(config: Config) -> int:
    """Groups that play or wait for a batch while all workers serve the newest weights."""
    data = config.data
    updates = (data.max_staleness + 1) * config.weights.publish_every
    in_time = data.groups_per_batch * ceil(updates / (1 + config.train.reuse))
    bounds = [in_time, data.max_open_groups or in_time]
    if data.scheduling == "batch":
        bounds.append(data.groups_per_batch)
    if data.scheduling == "april":
        bounds.append(ceil(round(data.over_provision * data.groups_per_batch, 9)))
    return min(bounds)


def _scheduling(config: Config) -> str:
    data = config.data
    unfinished = "recycled" if data.recycle else "discarded"
    how = {
        "rollout": "a freed slot plays the next trajectory at once",
        "task": "a freed slot waits for its group",
        "batch": "a freed slot waits for the batch",
        "april": f"{data.over_provision:g} x the groups of a batch play, the rest is {unfinished}",
    }
    turns = ", trainer and rollouts take turns" if data.coupled else ""
    return f"scheduling {data.scheduling}: {how[data.scheduling]}{turns}"


def _curation(data: DataConfig) -> str:
    """What decides which tasks, groups and steps are trained on."""
    drawn = "uniformly" if data.task_sampling == "uniform" else f"by {data.task_sampling}"
    parts = [f"tasks drawn {drawn}"]
    if data.advantage in BY_TRACKER:
        parts.append(f"advantages by {data.advantage.replace('_', ' ')}")
    if data.dynamic_number:
        parts.append(f"groups of {data.min_group_size} up where success is above 0.6")
    if data.dynamic_length:
        parts.append(f"at most {data.length_slack} steps above a task's longest success")
    if data.high_entropy < 1:
        parts.append(f"the {data.high_entropy:.0%} of steps of highest entropy")
    if data.pool_ratio:
        parts.append("a success of the pool for all-fail groups")
    if data.discount < 1:
        parts.append(f"returns discounted by {data.discount:g} a step")
    if data.screen_credit != "off":
        credit = data.screen_credit.replace("_", " ")
        parts.append(f"steps on one screen compared ({credit}, weight {data.screen_weight:g})")
    if data.fork_weight:
        parts.append(f"forks of weight {data.fork_weight:g}")
    return ", ".join(parts)


def _sync(config: Config) -> str:
    concurrent = config.sync.concurrent
    if config.data.coupled or not concurrent:
        return "all workers take new weights at once"
    return f"{concurrent} worker{'' if concurrent == 1 else 's'} at once take new weights"


def _train(config: Config) -> str:
    train = config.train
    limit = f" or {train.max_minutes:g} minutes" if train.max_minutes else ""
    if train.max_trajectories:
        limit += f" or {train.max_trajectories} trajectories"
    if train.stop_at:
        limit += f" or a success of {train.stop_at:g}"
    device = train.device
    if train.ranks > 1:
        device = f"{train.ranks} ranks, {device}"
    if config.gpus.train:
        device += f", GPU {', '.join(map(str, config.gpus.train))}"
    return (
        f"{train.updates} updates{limit} on {device}, {_rate(config)}, "
        f"{_reuse(train)}checkpoint every {train.checkpoint_every}; {_trained(config)}"
    )


def _reuse(train: TrainConfig) -> str:
    if not train.reuse:
        return ""
    return f"each batch again {train.reuse} x, {train.reuse_gap} updates apart at least, "


def _rate(config: Config) -> str:
    """The learning rate and its schedule."""
    train, origin = config.train, rate_origin(config)
    text = f"lr {train.rate:g}" + (f" ({origin})" if origin else "")
    if train.lr_end == 1:
        return text
    by_success = train.lr_follows == "success"
    if train.lr_hold:
        what = f"success is {(1 + train.lr_hold) / 2:g}" if by_success else f"{train.lr_hold:.0%}"
        text += f" until {what}, then"
    elif by_success:
        text += " until success is 0.5, then"
    text += f" falling to {train.rate * train.lr_end:g}"
    return text + (" at full success" if by_success else "")


def _trained(config: Config) -> str:
    """Which weights the trainer changes, and what it does for its memory."""
    if config.train.learner != "torch":
        return f"learner {config.train.learner}, which learns nothing"
    lora, train = config.model.lora, config.train
    if lora is not None:
        what = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets) or 'no layer'}"
        what += " and the vision tower" if lora.vision else ""
        what += f", begun with {config.model.adapters}" if config.model.adapters else ""
    else:
        what = "all weights" + (" but the vision tower" if config.model.freeze_vision else "")
    recompute = "recomputes each layer" if train.recompute == "layer" else "recomputes nothing"
    offload = "masters and moments in main memory" if train.offload == "optimizer" else "no offload"
    return f"trains {what}; packs of {train.pack_tokens} tokens, {recompute}, {offload}"


def _eval(config: Config) -> str:
    return (
        f"{config.eval.episodes} episodes sampled and {config.eval.episodes} greedy, "
        f"seeds from {config.eval.seed}"
    )
