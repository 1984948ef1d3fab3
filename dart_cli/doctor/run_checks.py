"""One configuration on this host: can its run start here?

configuration   its mistakes, all of them
directory       whether it can be made, its owner, its file system, its free space
ports           whether the address of `dart data` is free
model, tasks    what would be loaded, what would be played
learning_rate   the rate that follows from the model, where the file sets none
family          the family of models, why, and where each value of [policy] that it sets comes from
values          whether every number of the model's weights is finite
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from bus.errors import ConfigError, DartError, ModelError
from dart_cli.config.architecture import shape_of
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.families import FAMILIES, NONE, origin_line, origins, recognise, with_family
from dart_cli.config.learning_rate import rate_origin
from dart_cli.config.model_folder import (
    BUILTIN,
    CLASSES_CURE,
    folder_of,
    model_folder,
    model_problem,
    read_json,
)
from dart_cli.config.rules import Finding
from dart_cli.config.rules.check import find_mistakes
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.config.task_split import composed_tasks, trained_tasks
from dart_cli.data.store.open import DATABASE, LOCK, open_reader
from dart_cli.doctor.findings import error, ok, warning
from dart_cli.doctor.machine import GIB
from dart_cli.doctor.trainer_memory import WIDTH
from dart_cli.language.shortest_click import cut_off

LEAST_ROOM = 2 * GIB
"""Free space below which a run is not to be started."""
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs", "9p", "ceph", "afs")
"""File systems on which SQLite's shared-memory log and file locks are unreliable."""


def configuration(config: Config) -> Iterator[Finding]:
    """Every mistake that `dart up` would refuse, not only the first."""
    mistakes = list(find_mistakes(config))
    if not mistakes and (cut := cut_off(config)):
        mistakes = [cut]
    yield from mistakes
    if not mistakes:
        yield ok("config", "valid for every role")


def directory(config: Config) -> Iterator[Finding]:
    """Permissions, owner, file system and free space of run.dir, which is not made here."""
    path = config.run.dir
    place = existing(path)
    if path.exists():
        yield from _own(path)
    elif os.access(place, os.W_OK | os.X_OK):
        yield ok("run directory", f"{path} can be made")
    else:
        yield error(
            "run directory",
            f"{path} cannot be made: {place} is not yours to write",
            f"chown or chmod {place}, or choose another run.dir",
        )
    yield from judge_file_system(file_system(place), place)
    yield judge_room(shutil.disk_usage(place).free, config.data.max_gb, place)


def _own(path: Path) -> Iterator[Finding]:
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        yield error("run directory", f"{path} is no directory", "choose another run.dir")
    elif found.st_uid != os.getuid():
        yield error("run directory", f"{path} is another user's", "choose another run.dir")
    elif mode & 0o077:
        yield error(
            "run directory", f"others can enter {path} (mode {mode:04o})", f"chmod 700 {path}"
        )
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield error("run directory", f"{path} cannot be written", f"chmod 700 {path}")
    elif (path / DATABASE).is_file():
        yield from _run_in(path)
    else:
        yield ok("run directory", f"{path}, no run in it yet")


def _run_in(path: Path) -> Iterator[Finding]:
    """Yield the run in the directory: whether it is live, and can be read."""
    state = (
        f"a run is live in it (process {pid})"
        if (pid := holder(path))
        else "a run that can be continued"
    )
    try:
        with open_reader(path) as reader:
            trained = reader.total("batches")
    except DartError as fault:
        problem, _, cure = str(fault).partition("; ")
        aside = f"set it aside: mv {path} {path}.old"
        yield error("run directory", problem, f"{cure}, or {aside}" if cure else aside)
        return
    yield ok("run directory", f"{path}: {state}, {trained} batches")


def holder(run_dir: Path) -> str:
    """Process that serves the run, as the lock's holder wrote it; empty if none does.

    Takes no lock, which could refuse a `dart data` that starts at that moment: the kernel's list of
    locks is read instead.
    """
    path = run_dir / LOCK
    try:
        found = path.stat()
        pid = path.read_text(encoding="ascii").strip()
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return (pid or "unknown") if f" {device} " in locks else ""


def judge_file_system(kind: str, place: Path) -> Iterator[Finding]:
    """Yield an error for a network file system; nothing for one of this host."""
    if kind in NETWORK:
        yield error(
            "file system",
            f"{place} is on {kind}: the database's log needs a disk of this host",
            "choose a run.dir on a local disk; weights.directory may stay on the network",
        )


def judge_room(free: int, max_gb: float, place: Path) -> Finding:
    """`free` bytes where a database of up to `max_gb` and the weights will be stored."""
    found = f"{free / 1e9:.1f} GB free at {place}"
    if free < LEAST_ROOM:
        return error("disk", found, "free some, or choose another run.dir")
    if free < max_gb * 1e9:
        return warning(
            "disk",
            f"{found}, the database may take data.max_gb = {max_gb:g}",
            f"set data.max_gb = {free // 10**9}, or free some",
        )
    return ok("disk", found)


def file_system(place: Path) -> str:
    """Kind of the file system of `place`: that of the longest mount point above it."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    real = str(place.resolve())
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def ports(config: Config) -> Iterator[Finding]:
    """Whether `dart data` could listen at its configured address."""
    if config.bus.transport == "ipc":
        yield ok("sockets", f"ipc, in {config.run.dir / 'sock'}: one host, one user")
        return
    count = 3 if config.weights.channel == "file" else 4  # the last one is the trainer's
    wanted = range(config.bus.port, config.bus.port + count)
    if pid := holder(config.run.dir):
        yield ok("ports", f"{wanted[0]} to {wanted[-1]} are this run's, process {pid}")
        return
    for port in wanted:
        if problem := _cannot_listen(config.bus.host, port):
            fault, cure = problem
            where = f"bus.host {config.bus.host}, port {port}"
            yield error("ports", f"{where}: {fault}", f"{cure}; {_ELSEWHERE}")
            return
    yield ok("ports", f"{wanted[0]} to {wanted[-1]} of {config.bus.host} are free")


_ELSEWHERE = "on a host that does not run `dart data` this is no mistake"


def _cannot_listen(host: str, port: int) -> tuple[str, str] | None:
    """Return why `dart data` could not listen there, and the cure; None if it can."""
    address = (
        "set bus.host to an address of the host that runs `dart data` (hostname -I lists them)"
    )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as fault:
        cures = {
            errno.EADDRINUSE: "end what listens there (ss -ltnp), or change bus.port",
            errno.EACCES: "set bus.port to 1024 or more",
        }
        return fault.strerror or str(fault), cures.get(fault.errno or 0, address)
    except UnicodeError:  # a..b, say
        return "it is not a host name", address
    return None


def model_folder_alone(config: Config) -> Iterator[Finding]:
    """Yield a model folder without a run: all that is wrong with it, else what would be loaded."""
    if text := model_problem(config.model.path):
        problem, _, cure = text.partition("; ")
        yield error("model", f"model.path {problem}", cure)
        return
    yield from model(config)


def model(config: Config) -> Iterator[Finding]:
    """Yield what would be loaded; `configuration` reports its mistakes."""
    path = config.model.path
    if config.rollout.engine not in MODEL_ENGINES and config.train.learner != "torch":
        yield ok("model", f"none is loaded: engine {config.rollout.engine}")
        return
    if path in BUILTIN:
        yield ok("model", f"{path}, 0.6 million parameters")
        return
    if model_problem(path):
        return
    from dart_cli.policy.loader import check_weights  # late: it loads torch

    folder, wide = model_folder(path), WIDTH[config.model.dtype]
    try:
        shape = shape_of(read_json(folder, "config.json"))
        check_weights(folder)
    except ModelError as fault:
        problem, _, cure = str(fault).partition("; ")
        yield error("model", problem, cure)
        return
    count = shape.parameters
    found = f"{path}: {count / 1e9:.2f} billion parameters, {count * wide / GIB:.1f} GiB of weights"
    yield ok("model", found)
    lora = config.model.lora
    published = count if lora is None else shape.adapters(lora.rank)
    place = existing(weights_dir(config))
    free = shutil.disk_usage(place).free
    yield judge_weights(published * wide, config.weights.keep, free, place)


def learning_rate(config: Config) -> Iterator[Finding]:
    """Nothing where the file sets it."""
    if origin := rate_origin(config):
        yield ok("train.lr", f"{config.train.rate:g} ({origin})")


def judge_weights(size: int, keep: int, free: int, place: Path) -> Finding:
    """Whether `keep` weight sets of `size` bytes fit beside the one that is being written."""
    need = size * (keep + 1)
    found = f"weights.keep = {keep} sets take {need / 1e9:.1f} GB, {free / 1e9:.1f} free at {place}"
    if free < need:
        return error("weights", found, "free some, or choose another weights.directory")
    return ok("weights", found)


def tasks(config: Config) -> Iterator[Finding]:
    """Yield what would be played; `configuration` reports its mistakes."""
    try:
        trained, composed = trained_tasks(config), composed_tasks(config)
    except DartError:
        return
    if trained:
        yield ok("tasks", f"{len(trained)} of suite {config.env.suite}, {len(composed)} held out")
    else:
        yield error("tasks", f"suite {config.env.suite} has none to train on", "set env.tasks")


def family(config: Config, *, of_model: bool = False) -> Iterator[Finding]:
    """Of a model folder alone what `policy.family = "auto"` would set; nothing for a model that ships with dart."""
    folder = folder_of(config)
    name = config.policy.family
    if folder is None or (name == NONE and not of_model):
        return
    try:
        found = recognise(folder)
    except ConfigError as fault:
        found = None
        if name == NONE:
            problem, _, cure = str(fault).partition("; ")
            yield warning("family", f"policy.family {problem}", cure or "see docs/families.md")
            return
    if name == NONE and found is not None:
        name = found.name
        policy = config.policy.model_copy(update={"family": name})
        object.__setattr__(policy, "__pydantic_fields_set__", config.policy.model_fields_set)
        config = with_family(config.model_copy(update={"policy": policy}))
    if name not in FAMILIES:
        return
    its = FAMILIES[name]
    shown = f"; the folder shows it: {found.why}" if found and found.name == name else ""
    yield ok("family", f"{name}: {its.title}{shown}")
    if found is not None and found.name != name:
        cure = f'check the folder, or set policy.family = "{found.name}"'
        yield warning("family", f"{folder} shows {found.name} ({found.why}), not {name}", cure)
    if not its.is_loaded:
        text = f"no engine here loads model_type {' or '.join(its.model_types)}: action parser and prompt only"
        yield warning("family", text, f"to train a model: {CLASSES_CURE}")
    for each in origins(config):
        yield ok(f"policy.{each.key}", origin_line(each))


def values(config: Config) -> Iterator[Finding]:
    """Every number of the model's weights; minutes for a large model on a slow disk."""
    from dart_cli.policy.model_files import PolicyFiles  # late: it loads torch

    began, bad = time.monotonic(), dict[str, int]()
    try:
        with PolicyFiles(model_folder(config.model.path)) as files:
            names = files.names()
            for name in names:
                tensor = files.whole(name)
                if tensor.is_floating_point() and (count := int((~tensor.isfinite()).sum())):
                    bad[name] = count
    except DartError as fault:
        problem, _, cure = str(fault).partition("; ")
        yield error("values", problem, cure)
        return
    if bad:
        name, count = next(iter(bad.items()))
        yield error(
            "values",
            f"{len(bad)} of {len(names)} tensors have NaN or infinity, the first is {name} ({count} numbers)",
            "copy the weights again; if their source has them too, the training that wrote them failed",
        )
        return
    read, seconds = files.read_bytes / 1e9, time.monotonic() - began
    yield ok("values", f"all of {len(names)} tensors are finite ({read:.2f} GB, {seconds:.1f} s)")


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    whole = path.absolute()
    return next(each for each in (whole, *whole.parents) if each.exists())
