"""Check this host: what is installed, what is free, what the system allows.

    python, packages, gpus, programs, memory, shared_memory, open_files   one check each
    compute_modes   checks whether a GPU may have two processes, if weights are broadcast between GPUs
    env_limits      checks whether the slots of a run have the threads, processes and files that they need
    refuse_slots    raises ConfigError if the slots do not fit, for `--dry-run`
    excess          returns which limit the slots would exceed, and the fix (pure)

Functions that measure are separate from those that decide: `check_...` are pure.
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
"""Seconds in which another program must answer."""
TORCH_S = 120.0
"""Seconds in which `import torch` must end; on a cold network disk it takes minutes."""

LEAST_SHARED = 1 * GIB
"""Bytes of free shared memory below which there is a warning: with the 64 MiB that containers have by
default, NCCL and Chromium end with a bus error."""
LEAST_FILES, GOOD_FILES = 256, 4096
"""Limits of open files: below the first there is an error, below the second a warning. Each environment slot,
each connection and each weight file needs some."""

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
"""Optional packages: extra -> what needs it."""

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
"""Program -> its possible file names, the suite that needs it, how to install it."""


_WITHOUT_GPU = (
    "start it on a host that has them; to try it here, `dart up CONFIG --smoke-test`, or set devices to "
    '"cpu", lists to [] and a channel "nccl" to "gloo"'
)


def python() -> Iterator[Finding]:
    """Check the version of Python and the operating system."""
    version = ".".join(map(str, sys.version_info[:3]))
    host = f"{platform.system()} {platform.release()}, {len(_cores())} cores"
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        yield error("python", f"{version}, want {least} or newer", "scripts/setup with DART_PYTHON")
    elif platform.system() != "Linux":
        yield warning(
            "python", f"{version} on {host}", "use a Linux host: runs are tested on Linux only"
        )
    else:
        yield ok("python", f"{version}, {host}")


def packages() -> Iterator[Finding]:
    """Check the version of each required package, and of the extras that are installed."""
    try:
        requirements = [
            Requirement(package) for package in importlib.metadata.requires(DISTRIBUTION) or []
        ]
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        yield warning(
            "packages",
            f"{DISTRIBUTION} itself is not installed, so its requirements are unknown",
            "pip install -e . in dart's folder",
        )
        return
    required = [
        package for package in requirements if package.marker is None or package.marker.evaluate()
    ]
    versions = [(package, _version(package.name)) for package in required]
    bad = [finding for package, version in versions for finding in check_package(package, version)]
    yield from bad
    if not bad:
        yield ok("packages", f"all {len(versions)} that every run needs are installed")
    yield from _extras(requirements)


def _extras(requirements: Sequence[Requirement]) -> Iterator[Finding]:
    """Check the packages of each installed extra, and list the extras that are not installed."""
    absent = []
    for extra, use in EXTRAS.items():
        parts = [
            package
            for package in requirements
            if package.marker
            and not package.marker.evaluate()
            and package.marker.evaluate({"extra": extra})
        ]
        versions = [(package, _version(package.name)) for package in parts]
        if any(version is None for _, version in versions):
            absent.append(f"{extra} ({use})")
            continue
        for package, version in versions:
            yield from check_package(package, version)
    if absent:
        yield ok(
            "extras",
            f"not installed: {', '.join(absent)}; pip install -e '.[NAME]' in dart's folder",
        )


def check_package(requirement: Requirement, version: str | None) -> Iterator[Finding]:
    """Yield an error if a package is missing (`version` is None) or outside its bounds."""
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        yield error("packages", f"{requirement.name} is not installed", install)
    elif not requirement.specifier.contains(version, prereleases=True):
        yield error(
            "packages", f"{requirement.name} {version}, want {requirement.specifier}", install
        )


def gpus(asking: str = "") -> Iterator[Finding]:
    """Check whether torch sees the GPUs that nvidia-smi lists.

    `asking` names the keys of the run that ask for GPUs.
    """
    listed, fault = list_gpus()
    torch = ask_torch()
    if fault:
        yield warning("gpu", fault, "see `nvidia-smi`; the driver may need a restart of the host")
    yield from check_gpus(listed, torch, os.environ.get("CUDA_VISIBLE_DEVICES"), asking)


def list_gpus() -> tuple[list[str], str]:
    """Return (name and memory of each GPU of this host, the error if they cannot be listed)."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    answer, fault = run_program(
        ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    )
    return ([] if fault else answer.splitlines()), fault


def gpu_kinds() -> list[GpuKind]:
    """Return the GPUs of this host in nvidia-smi's order."""
    matches = [re.search(r"^(.*?), (\d+) MiB", line) for line in list_gpus()[0]]
    return [GpuKind(match[1], int(match[2]) * 2**20) for match in matches if match]


@cache
def ask_torch() -> dict[str, object] | str:
    """Return torch's version, CUDA version and number of GPUs, read in another process; or why it failed."""
    code = (
        "import json, torch; print(json.dumps({'version': torch.__version__, "
        "'cuda': torch.version.cuda, 'gpus': torch.cuda.device_count()}))"
    )
    answer, fault = run_program([sys.executable, "-c", code], TORCH_S)
    if fault:
        return fault
    return dict(json.loads(answer.splitlines()[-1]))


def check_gpus(
    listed: Sequence[str],
    torch: dict[str, object] | str,
    visible: str | None,
    asking: str = "",
) -> Iterator[Finding]:
    """Compare GPUs `listed` by nvidia-smi with torch's report and CUDA_VISIBLE_DEVICES (`visible`).

    `asking` names the keys of the run that ask for GPUs: a lack of GPUs is then an error instead of a
    warning.
    """
    if isinstance(torch, str):
        yield error("torch", f"cannot be imported: {torch}", "install it again: scripts/setup")
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU build"
    yield ok("torch", f"{torch['version']} ({build})")
    report = error if asking else warning
    setting = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
    if torch["gpus"]:
        names = "; ".join(listed) or "names unknown"
        yield ok("gpu", f"torch sees {torch['gpus']} of {len(listed) or '?'}{setting}: {names}")
        entries = (visible or "").split(",")
        if not entries[0].startswith("MIG-") and 1 < len(entries) != torch["gpus"]:
            yield report(
                "gpu",
                f"CUDA_VISIBLE_DEVICES lists {len(entries)} GPUs, torch sees {torch['gpus']}: CUDA stops at the "
                "first one that is not here",
                "name GPUs of `nvidia-smi -L`, each once",
            )
    elif not listed and not asking:
        yield ok("gpu", "none: the tiny model needs none, others need one")
    elif not listed:
        yield error("gpu", f"none, and the run asks for some: {asking}", _WITHOUT_GPU)
    elif setting:
        yield report(
            "gpu", f"torch sees none of {len(listed)} GPUs{setting}", "unset it, or name other GPUs"
        )
    else:
        yield report(
            "gpu",
            f"nvidia-smi lists {len(listed)} GPUs, torch sees none",
            "the driver is older than this torch's CUDA: update it, or install an older build"
            if torch["cuda"]
            else "install the CUDA build of torch: scripts/setup, or `pip install --force-reinstall torch=="
            # To pip the CPU build is the same version.
            f"{str(torch['version']).partition('+')[0]}`",
        )


def compute_modes(config: Config) -> Iterator[Finding]:
    """Check the compute mode of each GPU of this host, if weights are broadcast from GPU to GPU."""
    if config.weights.channel != "nccl" or shutil.which("nvidia-smi") is None:
        return
    answer, fault = run_program(
        ["nvidia-smi", "--query-gpu=index,compute_mode", "--format=csv,noheader"]
    )
    if fault:
        yield warning("gpu", f"compute modes: {fault}", "see `nvidia-smi -q -d COMPUTE`")
        return
    modes = dict(line.split(", ", 1) for line in answer.splitlines() if ", " in line)
    yield from check_modes(modes, shares=config.rollout.engine == "vllm")


def check_modes(modes: Mapping[str, str], *, shares: bool) -> Iterator[Finding]:
    """Check compute modes, given by GPU number.

    `shares` says that a rollout worker receives weights on the GPU on which its engine's process computes.
    """
    for mode in sorted(set(modes.values())):
        text = f"GPU {', '.join(gpu for gpu, its in modes.items() if its == mode)}: compute mode {mode}"
        if mode == "Prohibited":
            yield error("gpu", f"{text}, no process can use it", "sudo nvidia-smi -c DEFAULT")
        elif mode.startswith("Exclusive") and shares:
            yield error(
                "gpu",
                f'{text} allows one process, and with weights.channel = "nccl" a worker of vLLM has two',
                'sudo nvidia-smi -c DEFAULT, or set weights.channel = "gloo" or "file"',
            )
        else:
            yield ok("gpu", text)


def programs(suite: str | None) -> Iterator[Finding]:
    """Check the programs that some suites need. A missing one is an error if the run's suite needs it."""
    for name, (binaries, needed_by, fix) in PROGRAMS.items():
        path = next((path for binary in binaries if (path := shutil.which(binary))), None)
        if path is None and suite == needed_by:
            yield error(name, f"not found, and suite {suite} runs in it", fix)
        elif path is None:
            yield ok(name, f"not found; only suite {needed_by} needs it ({fix})")
        elif name == "Docker":
            yield from _docker(path, is_needed=suite == needed_by)
        else:
            yield ok(name, path)


def _docker(binary: str, *, is_needed: bool) -> Iterator[Finding]:
    """Check whether Docker's daemon answers this user; `is_needed` says that the run's suite needs it."""
    answer, fault = run_program([binary, "info", "--format", "{{.ServerVersion}}"])
    text = f"{binary} is installed, its daemon does not answer"
    if not fault:
        yield ok("Docker", f"{binary}, daemon {answer.strip()}")
    elif is_needed:
        yield error(
            "Docker",
            f"{text}: {fault}",
            "start it (systemctl start docker), and join its group: usermod -aG docker $USER",
        )
    else:
        yield ok("Docker", f"{text}; only suite {PROGRAMS['Docker'][1]} needs it")


def memory() -> Iterator[Finding]:
    """Check free main memory.

    Environments and the tiny model need little, large models much (see the plan).
    """
    measured = main_memory()
    if measured is None:
        return
    free, total = measured
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        yield warning("memory", text, "end what uses it: a run needs 2 GiB, plus its model")
    else:
        yield ok("memory", text)


def main_memory() -> tuple[int, int] | None:
    """Return (free, total) bytes of main memory within the container's limit; None if unknown."""
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
    """Return (used, allowed) bytes of the control group; None if it has no limit."""
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
    """Check the free space of /dev/shm."""
    if Path("/dev/shm").is_dir():  # noqa: S108 - measured, not written to
        yield check_shared(shutil.disk_usage("/dev/shm").free)  # noqa: S108


def check_shared(free: int) -> Finding:
    """Return a warning if `free` bytes of /dev/shm are too few."""
    text = f"{free / GIB:.2f} GiB free in /dev/shm"
    if free < LEAST_SHARED:
        return warning(
            "shared memory", text, "NCCL and Chromium need 1 GiB; for a container: --shm-size=8g"
        )
    return ok("shared memory", text)


def open_files() -> Iterator[Finding]:
    """Check how many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield check_files(soft, hard)


def check_files(soft: int, hard: int) -> Finding:
    """Return a finding about `soft`, the limit of open files; -1 means no limit.

    `hard` is the limit to which the user may raise `soft`.
    """
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft >= GOOD_FILES or soft == resource.RLIM_INFINITY:
        return ok("open files", text)
    fix = (
        f"ulimit -n {GOOD_FILES}"
        if hard == resource.RLIM_INFINITY or hard >= GOOD_FILES
        else "raise nofile in /etc/security/limits.conf, log in again"
    )
    report = warning if soft >= LEAST_FILES else error
    return report("open files", f"{text}: too few for many slots and workers", fix)


# --- slots -----------------------------------------------------------------------------------
# A slot in a thread is one thread (512 slots: 516 threads, 34 open files, 0.1 MB each). A slot in a process
# is a process with two threads, and needs four files in the process that plays it. A browser or a display
# that the suite starts is not included.

FILES_OF_A_PROCESS = 64
THREADS_OF_A_PROCESS = 16
THREADS_OF_A_CHILD = 3
FILES_OF_A_CHILD = 4


@dataclass(frozen=True)
class Limits:
    """Limits of the system; None means no limit."""

    files: int | None  # open files of one process
    threads: int | None  # threads of all processes of this user, or of the container


def limits() -> Limits:
    """Return the limits of `ulimit` and of the control group."""
    # root has no limit of threads
    user_threads = None if os.geteuid() == 0 else _soft_limit(resource.RLIMIT_NPROC)
    threads = [user_threads, _group_threads()]
    return Limits(_soft_limit(resource.RLIMIT_NOFILE), min(filter(None, threads), default=None))


def env_limits(config: Config) -> Iterator[Finding]:
    """Check whether all `dart env` processes that `dart up` starts fit the limits of this host."""
    here = limits()
    problem = excess(config, max(1, config.up.envs), here)
    if problem is None:
        yield ok("slots", f"{max(1, config.up.envs)} x {config.env.slots} fit this host's limits")
    else:
        yield error("slots", *problem)


def refuse_slots(config: Config, *, envs: int) -> None:
    """Raise ConfigError if `envs` processes of this configuration exceed a limit of this host."""
    if (problem := excess(config, envs, limits())) is not None:
        raise ConfigError("; ".join(problem))


def excess(config: Config, envs: int, here: Limits) -> tuple[str, str] | None:
    """Return (the limit that `envs` processes exceed, the fix); None if they exceed none."""
    slots = config.env.slots
    in_processes = config.env.isolation == "process"
    threads_per_slot = THREADS_OF_A_CHILD if in_processes else 1
    files_per_slot = FILES_OF_A_CHILD if in_processes else 0
    files = FILES_OF_A_PROCESS + files_per_slot * slots
    threads = envs * (THREADS_OF_A_PROCESS + threads_per_slot * slots)
    if here.files is not None and files > here.files:
        fit = (here.files - FILES_OF_A_PROCESS) // max(1, files_per_slot)
        return (
            f"env.slots = {slots} needs {files} open files in a process, at most {here.files} are allowed",
            f"run `ulimit -n {files}` first, or set env.slots = {max(1, fit)}",
        )
    if here.threads is not None and threads > here.threads:
        fit = (here.threads // envs - THREADS_OF_A_PROCESS) // threads_per_slot
        fix = (
            f"set env.slots = {max(1, fit)} and play the others on another host, or raise `ulimit -u` "
            "and the container's pids limit"
        )
        return (
            f"{envs} x env.slots = {slots} needs {threads} threads, at most {here.threads} are allowed here",
            fix,
        )
    return None


def _soft_limit(which: int) -> int | None:
    """Return a limit of `ulimit`; None if there is no limit."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _group_threads() -> int | None:
    """Return the most threads of the control group; None if it has no limit."""
    try:
        return int(Path("/sys/fs/cgroup/pids.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # version 1 of control groups, or "max"
        return None


# --- calling other programs ------------------------------------------------------------------


def run_program(command: Sequence[str], seconds: float = PROGRAM_S) -> tuple[str, str]:
    """Run a program with a deadline; return (its output, "") or, if it fails, ("", the reason)."""
    try:
        result = subprocess.run(
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
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        return "", f"exit code {result.returncode}: {lines[-1][:200]}"
    return result.stdout, ""


def _version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    if package == "vllm" and (vllm := vllm_installed()):
        return vllm[1]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> set[int]:
    """Return the CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
