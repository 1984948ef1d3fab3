"""Check a configuration on this host: whether its run can start here.

configuration   all mistakes of the configuration
directory       the run directory: its owner, file system and free space, or whether it can be made
ports           whether the address of the data service is free
model, tasks    the model that would be loaded, the tasks that would be played
learning_rate   the learning rate that follows from the model, if the file sets none
teacher         the model of [teacher]; nothing is sent to it
family          the family of models, how it was recognised, and the origin of its values in [policy]
values          whether all numbers of the model's weights are finite
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
from dart_cli.config.dry_run import teacher_line
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
from dart_cli.config.task_split import trained_tasks, untrained_tasks
from dart_cli.data.store.open import DATABASE, LOCK, open_reader
from dart_cli.doctor.machine import GIB
from dart_cli.doctor.trainer_memory import WIDTH
from dart_cli.language.shortest_click import find_cut_off
from dart_cli.runtime.findings import error, error_of, ok, warning

LEAST_ROOM = 2 * GIB
"""Bytes of free space below which a run should not be started."""
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs", "9p", "ceph", "afs")
"""File systems on which SQLite's shared-memory log and file locks are unreliable."""


def configuration(config: Config) -> Iterator[Finding]:
    """Yield all mistakes because of which `dart up` would refuse the configuration, not only the first."""
    mistakes = list(find_mistakes(config))
    if not mistakes and (cut := find_cut_off(config)):
        mistakes = [cut]
    yield from mistakes
    if not mistakes:
        yield ok("config", "valid for every role")


def directory(config: Config) -> Iterator[Finding]:
    """Check permissions, owner, file system and free space of run.dir. It is not created here."""
    path = config.run.dir
    place = existing(path)
    if path.exists():
        yield from _own(path)
    elif os.access(place, os.W_OK | os.X_OK):
        yield ok("run directory", f"{path} can be created")
    else:
        yield error(
            "run directory",
            f"{path} cannot be created: you may not write to {place}",
            f"chown or chmod {place}, or choose another run.dir",
        )
    yield from check_file_system(file_system(place), place)
    yield check_room(shutil.disk_usage(place).free, config.data.max_gb, place)


def _own(path: Path) -> Iterator[Finding]:
    """Check a run directory that exists: its kind, owner and permissions, and the run in it."""
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        yield error("run directory", f"{path} is no directory", "choose another run.dir")
    elif status.st_uid != os.getuid():
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
    """Yield a finding about the run in the directory: that it is running, can be continued or is broken."""
    state = (
        f"a run is running in it (process {pid})"
        if (pid := holder(path))
        else "a run that can be continued"
    )
    try:
        with open_reader(path) as reader:
            trained = reader.total("batches")
    except DartError as fault:
        problem, _, fix = str(fault).partition("; ")
        aside = f"set it aside: mv {path} {path}.old"
        yield error("run directory", problem, f"{fix}, or {aside}" if fix else aside)
        return
    yield ok("run directory", f"{path}: {state}, {trained} batches")


def holder(run_dir: Path) -> str:
    """Return the pid of the data service of the run, as it wrote it to the lock; empty if there is none.

    The kernel's list of locks is read. Taking the lock could make a data service fail that starts at that
    moment.
    """
    path = run_dir / LOCK
    try:
        status = path.stat()
        pid = path.read_text(encoding="ascii").strip()
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return (pid or "unknown") if f" {device} " in locks else ""


def check_file_system(kind: str, place: Path) -> Iterator[Finding]:
    """Yield an error for a network file system, nothing for a local one."""
    if kind in NETWORK:
        yield error(
            "file system",
            f"{place} is on {kind}: the database's log needs a disk of this host",
            "choose a run.dir on a local disk; weights.directory may stay on the network",
        )


def check_room(free: int, max_gb: float, place: Path) -> Finding:
    """Compare `free` bytes with what a database of up to `max_gb` and the weights need."""
    text = f"{free / 1e9:.1f} GB free at {place}"
    if free < LEAST_ROOM:
        return error("disk", text, "free some, or choose another run.dir")
    if free < max_gb * 1e9:
        return warning(
            "disk",
            f"{text}, but the database may take data.max_gb = {max_gb:g}",
            f"set data.max_gb = {free // 10**9}, or free some",
        )
    return ok("disk", text)


def file_system(place: Path) -> str:
    """Return the kind of the file system on which `place` is, e.g. `ext4`; empty if it is unknown."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    real = str(place.resolve())
    for line in mounts.splitlines():
        _, point, kind_here, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, kind_here
    return kind


def ports(config: Config) -> Iterator[Finding]:
    """Check whether the data service could listen at its configured address."""
    if config.bus.transport == "ipc":
        yield ok("sockets", f"ipc, in {config.run.dir / 'sock'}: one host, one user")
        return
    count = 3 if config.weights.channel == "file" else 4  # the fourth is the trainer's
    numbers = range(config.bus.port, config.bus.port + count)
    if pid := holder(config.run.dir):
        yield ok("ports", f"{numbers[0]} to {numbers[-1]} are this run's, process {pid}")
        return
    for port in numbers:
        if problem := _cannot_listen(config.bus.host, port):
            fault, fix = problem
            where = f"bus.host {config.bus.host}, port {port}"
            yield error("ports", f"{where}: {fault}", f"{fix}; {_ELSEWHERE}")
            return
    yield ok("ports", f"{numbers[0]} to {numbers[-1]} of {config.bus.host} are free")


_ELSEWHERE = "on a host that does not run `dart data` this is no mistake"


def _cannot_listen(host: str, port: int) -> tuple[str, str] | None:
    """Return (why the data service could not listen there, the fix); None if it could."""
    address = (
        "set bus.host to an address of the host that runs `dart data` (hostname -I lists them)"
    )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as fault:
        fixes = {
            errno.EADDRINUSE: "end what listens there (ss -ltnp), or change bus.port",
            errno.EACCES: "set bus.port to 1024 or more",
        }
        return fault.strerror or str(fault), fixes.get(fault.errno or 0, address)
    except UnicodeError:  # a..b, say
        return "it is not a host name", address
    return None


def model_folder_alone(config: Config) -> Iterator[Finding]:
    """Check a model folder without a run: yield its error, or else what would be loaded."""
    if text := model_problem(config.model.path):
        problem, _, fix = text.partition("; ")
        yield error("model", f"model.path {problem}", fix)
        return
    yield from model(config)


def model(config: Config) -> Iterator[Finding]:
    """Yield the size of the model that would be loaded, and whether its weight sets fit the disk.

    Mistakes that `configuration` reports are not repeated.
    """
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

    folder, bytes_per_number = model_folder(path), WIDTH[config.model.dtype]
    try:
        shape = shape_of(read_json(folder, "config.json"))
        check_weights(folder)
    except ModelError as fault:
        yield error_of("model", fault)
        return
    count = shape.parameters
    text = f"{path}: {count / 1e9:.2f} billion parameters, {count * bytes_per_number / GIB:.1f} GiB of weights"
    yield ok("model", text)
    lora = config.model.lora
    published = count if lora is None else shape.adapters(lora.rank)
    place = existing(weights_dir(config))
    free = shutil.disk_usage(place).free
    yield check_weight_sets(published * bytes_per_number, config.weights.keep, free, place)


def learning_rate(config: Config) -> Iterator[Finding]:
    """Yield the learning rate that follows from the model; yield nothing if the file sets one."""
    if origin := rate_origin(config):
        yield ok("train.lr", f"{config.train.rate:g} ({origin})")


def check_weight_sets(size: int, keep: int, free: int, place: Path) -> Finding:
    """Check whether `keep` weight sets of `size` bytes fit, and the one that is being written."""
    need = size * (keep + 1)
    text = f"weights.keep = {keep} sets take {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free at {place}"
    if free < need:
        return error("weights", text, "free some, or choose another weights.directory")
    return ok("weights", text)


def tasks(config: Config) -> Iterator[Finding]:
    """Yield how many tasks would be played. Mistakes that `configuration` reports are not repeated."""
    try:
        trained, heldout = trained_tasks(config), untrained_tasks(config)
    except DartError:
        return
    if trained:
        yield ok(
            "tasks", f"{len(trained)} of suite {config.env.suite}, {len(heldout)} never trained on"
        )
    else:
        yield error("tasks", f"suite {config.env.suite} has none to train on", "set env.tasks")


def teacher(config: Config) -> Iterator[Finding]:
    """Yield who plays or scores as [teacher], or what is wrong with it; nothing without a teacher.

    Nothing is sent. With train.teacher_weight it scores: what is wrong then is among the mistakes of the
    configuration, and only `dart data collect` checks whether it can also play.
    """
    scores = config.train.teacher_weight > 0
    if not (config.teacher.is_set or scores):
        return
    mistakes = list(find_mistakes(config, "train" if scores else "teacher"))
    if not scores:
        yield from mistakes
    if not any(mistake.subject.startswith("teacher") for mistake in mistakes):
        yield ok("teacher", teacher_line(config))


def family(config: Config, *, of_model: bool = False) -> Iterator[Finding]:
    """Yield the family of the model, and where each value of [policy] that it sets comes from.

    For a model folder alone (`of_model`) these are the values that `policy.family = "auto"` would set. Yield
    nothing for a model that ships with dart.
    """
    folder = folder_of(config)
    name = config.policy.family
    if folder is None or (name == NONE and not of_model):
        return
    try:
        recognised = recognise(folder)
    except ConfigError as fault:
        recognised = None
        if name == NONE:
            problem, _, fix = str(fault).partition("; ")
            if problem.rpartition("model.path: ")[2] not in model_problem(config.model.path):
                yield warning("family", f"policy.family {problem}", fix or "see docs/families.md")
            return
    if name == NONE and recognised is not None:
        name = recognised.name
        policy = config.policy.model_copy(update={"family": name})
        object.__setattr__(policy, "__pydantic_fields_set__", config.policy.model_fields_set)
        config = with_family(config.model_copy(update={"policy": policy}))
    if name not in FAMILIES:
        return
    traits = FAMILIES[name]
    why = (
        f"; the folder shows it: {recognised.why}" if recognised and recognised.name == name else ""
    )
    yield ok("family", f"{name}: {traits.title}{why}")
    if recognised is not None and recognised.name != name:
        fix = f'check the folder, or set policy.family = "{recognised.name}"'
        yield warning(
            "family", f"{folder} shows {recognised.name} ({recognised.why}), not {name}", fix
        )
    if not traits.is_loaded:
        text = f"no engine here loads model_type {' or '.join(traits.model_types)}: action parser and prompt only"
        yield warning("family", text, f"to train a model: {CLASSES_CURE}")
    for origin in origins(config):
        yield ok(f"policy.{origin.key}", origin_line(origin))


def values(config: Config) -> Iterator[Finding]:
    """Check every number of the model's weights. This takes minutes for a large model on a slow disk."""
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
        yield error_of("values", fault)
        return
    if bad:
        name, count = next(iter(bad.items()))
        yield error(
            "values",
            f"{len(bad)} of {len(names)} tensors have NaN or infinity, the first is {name} ({count} numbers)",
            "copy the weights again; if their source has them too, the training that wrote them failed",
        )
        return
    read_gb, seconds = files.read_bytes / 1e9, time.monotonic() - began
    yield ok(
        "values", f"all of {len(names)} tensors are finite ({read_gb:.2f} GB, {seconds:.1f} s)"
    )


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    whole = path.absolute()
    return next(folder for folder in (whole, *whole.parents) if folder.exists())
