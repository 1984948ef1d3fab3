"""Rules about places, sockets, GPUs and devices: of [run], [bus], [weights], [up].

unreadable          why the system does not let us look at a path
cannot_be_made      why a directory cannot be made
no_file, no_folder  why a path cannot be a file or a folder to write to, with the fix
refuse_out          raises the error for a folder that exists or cannot be made
refuse_filled       raises the error for a folder that is not empty or cannot be made
refuse_no_folder    raises the error for a path that cannot be a folder
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bus.endpoints import is_loopback
from bus.errors import ModelError, UserError
from dart_cli.config import devices
from dart_cli.config.architecture import MODEL_TYPES, shape_of
from dart_cli.config.devices import NO_GPU, VISIBLE, gpus_per_worker
from dart_cli.config.endpoints import KEY_FILE
from dart_cli.config.model_folder import folder_of, read_json
from dart_cli.config.rules import Condition, Rule, Table, twice, value_of
from dart_cli.config.schema import MODEL_ENGINES, Config

MOST_CPU_RANKS = 8
"""Number of ranks that may run on a CPU even if it has fewer cores, so that a small host can try them."""


def unreadable(path: Path | None) -> str:
    """Return why the system does not let us look at a path; empty if it does."""
    try:
        if path is not None:
            path.exists()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cannot_be_made(path: Path) -> str:
    """Return why a missing directory cannot be made; empty if it probably can."""
    whole = path.absolute()
    place = next(parent for parent in whole.parents if parent.exists())
    if not place.is_dir():
        return f"{place} is a file"
    system = [path.stat().st_dev for path in (Path("/proc"), Path("/sys")) if path.exists()]
    if place.stat().st_dev in system:
        return f"{place} is the kernel's"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not yours to write"
    return ""


def no_file(path: Path) -> str:
    """Return why a path cannot be a file to write, and the fix; empty if it probably can."""
    if why := unreadable(path):
        return f"cannot be read: {why}; choose another"
    if path.is_dir() or not path.parent.is_dir():
        why = "a folder" if path.is_dir() else f"there is no folder {path.parent}"
        return f"{why}; name a file in a folder that exists"
    if why := cannot_be_made(path):
        return f"cannot be written: {why}; choose another"
    if path.exists() and not os.access(path, os.W_OK):
        return "is not yours to write; choose another"
    return ""


def no_folder(path: Path) -> str:
    """Return why a path cannot be a folder to write to, and the fix; empty if it probably can."""
    if why := unreadable(path):
        return f"cannot be read: {why}; choose another"
    if path.exists():
        return "" if path.is_dir() else "is a file; name a folder"
    why = cannot_be_made(path)
    return f"cannot be made: {why}; choose another" if why else ""


def refuse_out(out: Path) -> None:
    """Raise UserError where `out` exists, has no parent or cannot be made."""
    if why := unreadable(out):
        raise UserError(f"{out}: cannot be read: {why}; choose another")
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.absolute().parent}")
    refuse_no_folder(out)


def refuse_filled(out: Path) -> None:
    """Raise UserError where `out` is not empty, is a file or cannot be made."""
    refuse_no_folder(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists; name a folder that is not there yet")


def refuse_no_folder(out: Path) -> None:
    """Raise UserError where `out` is a file or cannot be made."""
    if why := no_folder(out):
        raise UserError(f"{out}: {why}")


def _of_path(key: str, about: Callable[[Path], object]) -> Condition:
    """Return a condition on the path of a key that may be unset."""

    def broken(config: Config) -> object:
        path = value_of(config, key)
        return path is not None and about(path)

    return broken


_DIRECTORIES = ("run.dir", "weights.directory")
PLACES = Table(
    (
        *(
            Rule(
                key,
                _of_path(key, unreadable),
                "cannot be read: {detail}; choose another, got {value}",
                ends=True,
            )
            for key in (*_DIRECTORIES, "bus.keys")
        ),
        *(
            Rule(
                key,
                _of_path(key, lambda path: path.exists() and not path.is_dir()),
                "is a file, want a directory: {value}; choose another",
            )
            for key in _DIRECTORIES
        ),
        *(
            Rule(
                key,
                _of_path(key, lambda path: not path.exists() and cannot_be_made(path)),
                "= {value} cannot be made: {detail}; choose another",
            )
            for key in _DIRECTORIES
        ),
        Rule(
            "run.dir",
            lambda c: Path.cwd().resolve().is_relative_to(c.run.dir.resolve()),
            "contains the current directory, got {value}; choose one for this run alone, e.g. runs/a",
        ),
        Rule(
            "bus.keys",
            lambda c: c.bus.keys is not None and not c.bus.host,
            "is of tcp, and bus.host is empty: sockets in the run directory are private already; remove it",
        ),
        Rule(
            "bus.keys",
            lambda c: (
                c.bus.transport == "tcp" and c.bus.keys and not (c.bus.keys / KEY_FILE).is_file()
            ),
            f"has no {KEY_FILE}: {{bus.keys}}; make it with `dart keys {{bus.keys}}`",
        ),
        Rule(
            "bus.host",
            lambda c: (
                c.bus.transport == "tcp" and c.bus.keys is None and not is_loopback(c.bus.host)
            ),
            '= {value} is beyond loopback and needs CURVE keys; set bus.keys, or bus.host = "127.0.0.1"',
        ),
    )
)


def _shared(config: Config) -> str:
    """Return the first GPU that both lists of [up] name; empty without one."""
    both = {*config.up.train_gpus} & {*config.up.rollout_gpus}
    return str(min(both)) if both else ""


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _trainer_gpus(config: Config) -> str:
    """Return why `up.train_gpus` has the wrong length, and the fix; empty if it is right."""
    listed, ranks = len(config.up.train_gpus), config.train.ranks
    if listed in (0, ranks):
        return ""
    return (
        f"lists {_gpus(listed)} for train.ranks = {ranks}; list one for each rank, or set "
        f"train.ranks = {listed}"
    )


def _rollout_gpus(config: Config) -> str:
    """Return why `up.rollout_gpus` has the wrong length, and the fix; empty if it is right."""
    listed, workers = len(config.up.rollout_gpus), config.up.rollouts
    per_worker = gpus_per_worker(config)
    if listed in (0, per_worker * workers):
        return ""
    by = f" x vllm.tensor_parallel = {per_worker}" if per_worker > 1 else ""
    fix = f"list {per_worker * workers}"
    if listed % per_worker == 0:
        fix += f", or set up.rollouts = {listed // per_worker}"
    return f"lists {_gpus(listed)} for up.rollouts = {workers}{by}; {fix}"


def _without_gpu(config: Config) -> str:
    """Return which key keeps the trainer or the rollout workers off GPUs; empty if none does."""
    if config.rollout.engine not in MODEL_ENGINES:
        return f'rollout.engine = "{config.rollout.engine}" has none'
    parts = {"train": config.train.device, "rollout": config.rollout.device}
    on_cpu = (f'{name}.device = "cpu"' for name, device in parts.items() if device == "cpu")
    return next(on_cpu, "")


def _named_twice(section: str) -> Rule:
    """Return the rule that a section's device and its list in [up] do not both choose GPUs."""

    def listed(config: Config) -> object:
        is_chosen = getattr(config, section).device not in ("auto", "cuda")
        return is_chosen and getattr(config.up, f"{section}_gpus")

    text = f'= "{{{section}.device}}" and up.{section}_gpus = {{detail}} both name a device; set "cuda"'
    return Rule(f"{section}.device", listed, text)


GPUS = Table(
    (
        twice("up.train_gpus"),
        twice("up.rollout_gpus"),
        Rule(
            "up.rollout_gpus",
            _shared,
            "lists GPU {detail}, which up.train_gpus lists too; neither leaves room for the other, remove "
            "it from one of them",
        ),
        Rule("up.train_gpus", _trainer_gpus, "{detail}"),
        Rule("up.rollout_gpus", _rollout_gpus, "{detail}"),
        *map(_named_twice, ("train", "rollout")),
        Rule(
            "train.ranks",
            lambda c: c.train.ranks > 1 and c.train.learner != "torch",
            '= {value} and train.learner = "{train.learner}", which is one process; set 1',
        ),
        Rule(
            "train.device",
            lambda c: c.train.ranks > 1 and ":" in c.train.device and not c.up.train_gpus,
            '= {value} is one device, train.ranks = {train.ranks} needs as many; set "cuda", and the '
            "GPUs by up.train_gpus",
        ),
        Rule(
            "weights.channel",
            lambda c: c.weights.channel == "nccl" and _without_gpu(c),
            '= "nccl" goes from GPU to GPU, and {detail}; set "gloo" or "file"',
        ),
        Rule(
            "train.offload",
            lambda c: c.train.offload == "optimizer" and c.train.device == "cpu",
            '= "optimizer" moves masters and moments to main memory, where train.device = "cpu" has '
            'them already; set "none"',
        ),
    )
)


# --- what this machine has: devices.visible_gpus() is None where only torch knows


def _index(device: str) -> int:
    """Return the index of the GPU that a process takes, among those it sees."""
    return int(device.partition(":")[2] or 0)


def _not_there(section: str) -> Condition:
    """Return the condition that this host lacks the GPU of a section's device; its detail says why."""

    def broken(config: Config) -> str:
        device, count = getattr(config, section).device, devices.visible_gpus()
        if count is None or not device.startswith("cuda"):
            return ""
        if count == 0:
            return f'but {NO_GPU}; set "auto" or "cpu"'
        problem = f"but there are only cuda:0 to cuda:{count - 1}"
        return problem if _index(device) >= count else ""

    return broken


def _no_kernel(section: str) -> Condition:
    """Return the condition that a section's GPU lacks the kernel of the model's recurrent layers; its detail says so."""

    def broken(config: Config) -> str:
        device, count = getattr(config, section).device, devices.visible_gpus()
        if device == "cpu" or (not count and not device.startswith("cuda")):
            return ""
        loads = {"train": config.train.learner == "torch"}
        loads["rollout"] = config.rollout.engine == "transformers"
        folder = folder_of(config)
        if not loads[section] or folder is None:
            return ""
        try:
            tree = read_json(folder, "config.json")
            recurrent = tree.get("model_type") in MODEL_TYPES and shape_of(tree).delta is not None
        except ModelError:
            return ""  # the rules of [model] report it
        return devices.kernel_problem() if recurrent else ""

    return broken


_KERNEL = "= {value} cannot be used with model.path = {model.path}: {detail}"


def _would_share(config: Config) -> bool:
    """Return True if trainer and rollout workers start on this host, use NCCL, and would share a GPU."""
    if config.weights.channel != "nccl" or config.bus.transport != "ipc":
        return False
    placed = all(devices.divide_gpus(config, devices.gpus_here()))
    are_same = _index(config.train.device) == _index(config.rollout.device)
    return not placed and (are_same or config.up.rollouts > 1)


_ONE_EACH = (
    '= "nccl" needs a GPU for each process, and trainer and rollout workers would share one; '
    'name theirs by up.train_gpus and up.rollout_gpus, or set "gloo" or "file"'
)


def _unusable_gpus(key: str) -> Condition:
    """Return the condition that a list of [up] has a number without a GPU; its detail has the fix."""
    return lambda config: devices.gpus_problem(value_of(config, key))


def _starts_all() -> bool:
    """Return True if all ranks are started here. With torchrun they may be on several hosts."""
    return "WORLD_SIZE" not in os.environ


def _too_many_ranks(config: Config) -> str:
    """Return why this host cannot run `train.ranks` ranks, and the fix; empty if it can."""
    train, count = config.train, devices.visible_gpus()
    if count is None or not _starts_all():
        return ""
    if train.device != "cpu" and count:
        if ":" in train.device or train.ranks <= count:
            return ""
        visible = f"{_gpus(count)} {'is' if count == 1 else 'are'} visible"
        return f"but {visible}; set train.ranks = {count}, or start the others by torchrun"
    most = max(MOST_CPU_RANKS, os.cpu_count() or 1)
    if train.device.startswith("cuda") or train.ranks <= most:
        return ""
    why = NO_GPU if train.device == "auto" else "no GPU is used"
    return f"but {why}, and on the CPU there are at most {most} here; lower train.ranks"


OF_UP = Table(
    (
        *(
            Rule(key, _unusable_gpus(key), "= {value} {detail}", ends=True)
            for key in ("up.train_gpus", "up.rollout_gpus")
        ),
        Rule("weights.channel", lambda c: VISIBLE in os.environ and _would_share(c), _ONE_EACH),
    ),
    ("up",),
)
"""Rules for all processes together. A process that is started by hand may have its own list of GPUs:
devices.gpus_of."""
TRAINER = Table(
    (
        Rule("train.device", _not_there("train"), "= {value} {detail}"),
        Rule("train.device", _no_kernel("train"), _KERNEL),
        Rule("train.ranks", _too_many_ranks, "= {value} {detail}"),
        Rule(
            "train.offload",
            lambda c: (
                c.train.offload == "optimizer"
                and c.train.device == "auto"
                and devices.visible_gpus() == 0
            ),
            f'= "optimizer" but {NO_GPU}, so masters and moments are in main memory already; '
            'set "none"',
        ),
        Rule(
            "up.train_gpus",
            lambda c: c.up.train_gpus and devices.is_under_torchrun() and VISIBLE not in os.environ,
            "= {value} and torchrun, which gives each rank a GPU of its own: leave it empty, and choose "
            f"GPUs by {VISIBLE} on each host",
        ),
    ),
    ("train", "tune"),
)
WORKERS = Table(
    (
        Rule("rollout.device", _not_there("rollout"), "= {value} {detail}"),
        Rule("rollout.device", _no_kernel("rollout"), _KERNEL),
    ),
    ("rollout", "eval"),
)
NCCL = Table(
    (
        Rule(
            "weights.channel",
            lambda c: c.weights.channel == "nccl" and devices.visible_gpus() == 0,
            f'= "nccl" but {NO_GPU}; set "gloo", the same over TCP',
            ends=True,
        ),
        Rule(
            "weights.channel",
            lambda c: VISIBLE not in os.environ and _would_share(c),
            _ONE_EACH,
        ),
    ),
    ("rollout", "train"),
)
