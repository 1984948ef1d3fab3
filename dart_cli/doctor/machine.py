"""This host: what is installed, how much of it is free, what the system allows.

    python, packages, torch, gpus, programs, memory, shared_memory, open_files   a check each
    compute_modes   whether GPUs take two processes, where weights are broadcast between them
    env_limits      whether the slots of a run have the threads, processes and files they need
    refuse_slots    raises where they have not, for `--dry-run`
    excess          what they would exceed, and the cure (pure)

Measuring and judging are separate functions: `judge_...` are pure.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from bus.errors import ConfigError
from dart_cli.config.devices import vllm_installed
from dart_cli.config.rules import Finding
from dart_cli.config.schema import Config
from dart_cli.doctor.plan import GpuKind
from dart_cli.runtime.findings import error, ok, warning

LEAST_PYTHON = (3, 11)
GIB = 2**30

PROGRAM_S = 20.0
"""Longest time another program may take to answer."""
TORCH_S = 120.0
"""Longest time `import torch` may take; on a cold network disk it takes minutes."""

LEAST_SHARED = 1 * GIB
"""Less free shared memory is a warning: with a container's default of 64 MiB, NCCL and Chromium
end with a bus error."""
LEAST_FILES, GOOD_FILES = 256, 4096
"""Open files: each environment slot, each connection and each weight file takes some."""

DISTRIBUTION = "dart-cli"
EXTRAS = {
    "vllm": "engine vllm",
    "osworld": "suite osworld",
    "miniwob": "suite miniwob",
    "desktop": "suite desktop",
    "gym": "suite gym:ENV_ID",
    "parquet": "dart data export, import",
    "view": "dart view",
    "ray": "dart up --ray",
    "metrics": "dart status --prometheus",
}
"""Optional packages: the extra, and what needs it."""

PROGRAMS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "Chromium": (
        (
            *("/usr/lib/chromium/chromium-headless-shell", "chromium-headless-shell"),
            *("chromium", "chromium-browser", "google-chrome"),
        ),
        "miniwob",
        "apt install chromium-headless-shell",
    ),
    "Xvfb": (("Xvfb",), "desktop", "apt install xvfb"),
    "Docker": (("docker",), "osworld", "install Docker: https://docs.docker.com/engine/install"),
}
"""Program -> its possible names, the suite that needs it, how to install it."""


_WITHOUT_GPU = (
    "start it on a host that has them; to try it here, `dart up CONFIG --smoke-test`, or set devices to "
    '"cpu", lists to [] and a channel "nccl" to "gloo"'
)


def python() -> Iterator[Finding]:
    """Version, system, cores."""
    found = ".".join(map(str, sys.version_info[:3]))
    host = f"{platform.system()} {platform.release()}, {len(_cores())} cores"
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        yield error("python", f"{found}, want {least} or newer", "scripts/setup with DART_PYTHON")
    elif platform.system() != "Linux":
        yield warning("python", f"{found} on {host}", "take a Linux host: runs are tested on Linux")
    else:
        yield ok("python", f"{found}, {host}")


def packages() -> Iterator[Finding]:
    """Each required package against its bounds; of an extra only whether it is installed."""
    try:
        requirements = [
            Requirement(each) for each in importlib.metadata.requires(DISTRIBUTION) or []
        ]
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        yield warning(
            "packages",
            f"{DISTRIBUTION} itself is not installed, so its requirements are unknown",
            "pip install -e . in dart's folder",
        )
        return
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate()]
    found = [(each, _version(each.name)) for each in needed]
    bad = [finding for each, version in found for finding in check_package(each, version)]
    yield from bad
    if not bad:
        yield ok("packages", f"all {len(found)} that every run needs are installed")
    yield from _extras(requirements)


def _extras(requirements: Sequence[Requirement]) -> Iterator[Finding]:
    absent = []
    for extra, use in EXTRAS.items():
        parts = [
            each
            for each in requirements
            if each.marker and not each.marker.evaluate() and each.marker.evaluate({"extra": extra})
        ]
        versions = [(each, _version(each.name)) for each in parts]
        if any(version is None for _, version in versions):
            absent.append(f"{extra} ({use})")
            continue
        for each, version in versions:
            yield from check_package(each, version)
    if absent:
        yield ok(
            "extras",
            f"not installed: {', '.join(absent)}; pip install -e '.[NAME]' in dart's folder",
        )


def check_package(wanted: Requirement, version: str | None) -> Iterator[Finding]:
    """Nothing for a package within its bounds."""
    install = f"pip install '{wanted.name}{wanted.specifier}'"
    if version is None:
        yield error("packages", f"{wanted.name} is not installed", install)
    elif not wanted.specifier.contains(version, prereleases=True):
        yield error("packages", f"{wanted.name} {version}, want {wanted.specifier}", install)


def gpus(asking: str = "") -> Iterator[Finding]:
    """Yield what nvidia-smi lists, and whether torch sees the same. `asking` are the keys that ask for GPUs, in words."""
    listed, fault = list_gpus()
    seen = ask_torch()
    if fault:
        yield warning("gpu", fault, "see `nvidia-smi`; the driver may need a restart of the host")
    yield from check_gpus(listed, seen, os.environ.get("CUDA_VISIBLE_DEVICES"), asking)


def list_gpus() -> tuple[list[str], str]:
    """(name and memory of each GPU of the host, why they could not be listed)."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    answer, fault = ask(
        ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    )
    return ([] if fault else answer.splitlines()), fault


def gpu_kinds() -> list[GpuKind]:
    """Each GPU of the host, in nvidia-smi's order."""
    found = [re.search(r"^(.*?), (\d+) MiB", line) for line in list_gpus()[0]]
    return [GpuKind(match[1], int(match[2]) * 2**20) for match in found if match]


@cache
def ask_torch() -> dict[str, object] | str:
    """Version, CUDA and number of GPUs of torch, from a process of its own; or why it gave none."""
    code = (
        "import json, torch; print(json.dumps({'version': torch.__version__, "
        "'cuda': torch.version.cuda, 'gpus': torch.cuda.device_count()}))"
    )
    answer, fault = ask([sys.executable, "-c", code], TORCH_S)
    if fault:
        return fault
    found = json.loads(answer.splitlines()[-1])
    return dict(found)


def check_gpus(
    listed: Sequence[str],
    torch: dict[str, object] | str,
    visible: str | None,
    asking: str = "",
) -> Iterator[Finding]:
    """Judge GPUs `listed` on the host, torch's report, CUDA_VISIBLE_DEVICES, and what the run asks for (see `gpus`)."""
    if isinstance(torch, str):
        yield error("torch", f"cannot be imported: {torch}", "install it again: scripts/setup")
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU build"
    yield ok("torch", f"{torch['version']} ({build})")
    judge = error if asking else warning
    chosen = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
    if torch["gpus"]:
        names = "; ".join(listed) or "names unknown"
        yield ok("gpu", f"torch sees {torch['gpus']} of {len(listed) or '?'}{chosen}: {names}")
        entries = (visible or "").split(",")
        if not entries[0].startswith("MIG-") and 1 < len(entries) != torch["gpus"]:
            yield judge(
                "gpu",
                f"CUDA_VISIBLE_DEVICES lists {len(entries)}, torch sees {torch['gpus']}: CUDA stops at the "
                "first that is not here",
                "name GPUs of `nvidia-smi -L`, each once",
            )
    elif not listed and not asking:
        yield ok("gpu", "none: the tiny model needs none, others need one")
    elif not listed:
        yield error("gpu", f"none, and the run asks for some: {asking}", _WITHOUT_GPU)
    elif chosen:
        yield judge(
            "gpu", f"torch sees none of {len(listed)}{chosen}", "unset it, or name other GPUs"
        )
    else:
        yield judge(
            "gpu",
            f"nvidia-smi lists {len(listed)}, torch sees none",
            "the driver is older than this torch's CUDA: update it, or install an older build"
            if torch["cuda"]
            else "install the CUDA build of torch: scripts/setup, or `pip install --force-reinstall torch=="
            f"{str(torch['version']).partition('+')[0]}`",  # the CPU build is the same version to pip
        )


def compute_modes(config: Config) -> Iterator[Finding]:
    """Judge the compute mode of each GPU of this host, where weights are broadcast from GPU to GPU."""
    if config.weights.channel != "nccl" or shutil.which("nvidia-smi") is None:
        return
    answer, fault = ask(["nvidia-smi", "--query-gpu=index,compute_mode", "--format=csv,noheader"])
    if fault:
        yield warning("gpu", f"compute modes: {fault}", "see `nvidia-smi -q -d COMPUTE`")
        return
    modes = dict(line.split(", ", 1) for line in answer.splitlines() if ", " in line)
    yield from check_modes(modes, shares=config.rollout.engine == "vllm")


def check_modes(modes: Mapping[str, str], *, shares: bool) -> Iterator[Finding]:
    """Judge the compute modes, by GPU.

    `shares`: a rollout worker receives on the GPU that another process of it computes on.
    """
    for mode in sorted(set(modes.values())):
        named = f"GPU {', '.join(gpu for gpu, its in modes.items() if its == mode)}: mode {mode}"
        if mode == "Prohibited":
            yield error("gpu", f"{named}, no process can use it", "sudo nvidia-smi -c DEFAULT")
        elif mode.startswith("Exclusive") and shares:
            yield error(
                "gpu",
                f'{named} allows one process, and with weights.channel = "nccl" a worker of vLLM has two',
                'sudo nvidia-smi -c DEFAULT, or set weights.channel = "gloo" or "file"',
            )
        else:
            yield ok("gpu", named)


def programs(suite: str | None) -> Iterator[Finding]:
    """Programs that some suites need; a missing one is an error if the run's suite needs it."""
    for name, (binaries, needed_by, cure) in PROGRAMS.items():
        found = next((path for each in binaries if (path := shutil.which(each))), None)
        if found is None and suite == needed_by:
            yield error(name, f"not found, and suite {suite} runs in it", cure)
        elif found is None:
            yield ok(name, f"not found; only suite {needed_by} needs it ({cure})")
        elif name == "Docker":
            yield from _docker(found, needed=suite == needed_by)
        else:
            yield ok(name, found)


def _docker(binary: str, *, needed: bool) -> Iterator[Finding]:
    """Whether this user may talk to the daemon."""
    answer, fault = ask([binary, "info", "--format", "{{.ServerVersion}}"])
    found = f"{binary} is installed, its daemon does not answer"
    if not fault:
        yield ok("Docker", f"{binary}, daemon {answer.strip()}")
    elif needed:
        yield error(
            "Docker",
            f"{found}: {fault}",
            "start it (systemctl start docker), and join its group: usermod -aG docker $USER",
        )
    else:
        yield ok("Docker", f"{found}; only suite {PROGRAMS['Docker'][1]} needs it")


def memory() -> Iterator[Finding]:
    """Examine main memory: environments and the tiny model need little, large models much."""
    measured = main_memory()
    if measured is None:
        return
    free, total = measured
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        yield warning("memory", found, "end what uses it: a run needs 2 GiB, plus its model")
    else:
        yield ok("memory", found)


def main_memory() -> tuple[int, int] | None:
    """(free, all) bytes of main memory, within the container's limit; None where it is unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    free, total = kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024
    if (bound := _container_bytes()) is not None and bound[1] < total:
        return min(free, bound[1] - bound[0]), bound[1]
    return free, total


def _container_bytes() -> tuple[int, int] | None:
    """Return (used, allowed) bytes of the control group; None where it has no limit."""
    group = Path("/sys/fs/cgroup")
    try:
        used, allowed = (
            (group / f"memory.{name}").read_text(encoding="ascii").strip()
            for name in ("current", "max")
        )
        return int(used), int(allowed)
    except (OSError, ValueError):  # version 1 of control groups, or "max"
        return None


def shared_memory() -> Iterator[Finding]:
    """Free space of /dev/shm."""
    if Path("/dev/shm").is_dir():  # noqa: S108 - measured, not written to
        yield check_shared(shutil.disk_usage("/dev/shm").free)  # noqa: S108


def check_shared(free: int) -> Finding:
    """`free` bytes of /dev/shm."""
    found = f"{free / GIB:.2f} GiB free in /dev/shm"
    if free < LEAST_SHARED:
        return warning(
            "shared memory", found, "NCCL and Chromium need 1 GiB; for a container: --shm-size=8g"
        )
    return ok("shared memory", found)


def open_files() -> Iterator[Finding]:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield check_files(soft, hard)


def check_files(soft: int, hard: int) -> Finding:
    """Return the limit now (`soft`) and the one it may be raised to (`hard`); -1 for none."""
    least = soft >= LEAST_FILES or soft == resource.RLIM_INFINITY
    enough = soft >= GOOD_FILES or soft == resource.RLIM_INFINITY
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if enough:
        return ok("open files", found)
    can = hard == resource.RLIM_INFINITY or hard >= GOOD_FILES
    cure = (
        f"ulimit -n {GOOD_FILES}"
        if can
        else "raise nofile in /etc/security/limits.conf, log in again"
    )
    judge = warning if least else error
    return judge("open files", f"{found}: too few for many slots and workers", cure)


# --- slots -----------------------------------------------------------------------------------
# A slot in a thread is one thread (512 slots: 516 threads, 34 open files, 0.1 MB each); a slot in a process of
# its own is that process with two threads, and four files of the one that plays it. What a suite starts for
# itself, a browser or a display, comes on top of it.

FILES_OF_A_PROCESS = 64
THREADS_OF_A_PROCESS = 16
THREADS_OF_A_CHILD = 3
FILES_OF_A_CHILD = 4


@dataclass(frozen=True)
class Limits:
    """None for no limit."""

    files: int | None  # of one process
    threads: int | None  # of all processes of this user, or of the container


def limits() -> Limits:
    """Return what `ulimit` and the control group allow here."""
    of_user = None if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)  # root has none
    threads = [of_user, _of_group()]
    return Limits(_soft(resource.RLIMIT_NOFILE), min(filter(None, threads), default=None))


def env_limits(config: Config) -> Iterator[Finding]:
    """Of all `dart env` processes that `dart up` starts here."""
    here = limits()
    problem = excess(config, max(1, config.up.envs), here)
    if problem is None:
        yield ok("slots", f"{max(1, config.up.envs)} x {config.env.slots} fit this host's limits")
    else:
        yield error("slots", *problem)


def refuse_slots(config: Config, *, envs: int) -> None:
    """Raise ConfigError where `envs` processes of this configuration would exceed a limit."""
    if (problem := excess(config, envs, limits())) is not None:
        raise ConfigError("; ".join(problem))


def excess(config: Config, envs: int, here: Limits) -> tuple[str, str] | None:
    """Return (what does not fit, the cure) of so many `dart env` processes; None if all fits."""
    slots = config.env.slots
    in_processes = config.env.isolation == "process"
    threads_each = THREADS_OF_A_CHILD if in_processes else 1
    files_each = FILES_OF_A_CHILD if in_processes else 0
    files = FILES_OF_A_PROCESS + files_each * slots
    threads = envs * (THREADS_OF_A_PROCESS + threads_each * slots)
    if here.files is not None and files > here.files:
        fit = (here.files - FILES_OF_A_PROCESS) // max(1, files_each)
        return (
            f"env.slots = {slots} needs {files} open files in a process, at most {here.files} are allowed",
            f"run `ulimit -n {files}` first, or set env.slots = {max(1, fit)}",
        )
    if here.threads is not None and threads > here.threads:
        fit = (here.threads // envs - THREADS_OF_A_PROCESS) // threads_each
        cure = (
            f"set env.slots = {max(1, fit)} and play the others on another host, or raise `ulimit -u` "
            "and the container's pids limit"
        )
        return (
            f"{envs} x env.slots = {slots} needs {threads} threads, at most {here.threads} are allowed here",
            cure,
        )
    return None


def _soft(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _of_group() -> int | None:
    """Most threads of the control group; None without a limit."""
    try:
        return int(Path("/sys/fs/cgroup/pids.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # version 1 of control groups, or "max"
        return None


# --- calling other programs ------------------------------------------------------------------


def ask(command: Sequence[str], seconds: float = PROGRAM_S) -> tuple[str, str]:
    """(output of a program, "") or ("", why it failed), within a deadline."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"{Path(command[0]).name} gave no answer in {seconds:.0f} s"
    except OSError as fault:
        return "", f"{command[0]}: {fault.strerror}"
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or ["no output"]
        return "", f"exit code {ended.returncode}: {lines[-1][:200]}"
    return ended.stdout, ""


def _version(package: str) -> str | None:
    if package == "vllm" and (found := vllm_installed()):
        return found[1]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
