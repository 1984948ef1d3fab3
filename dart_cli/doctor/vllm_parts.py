"""What vLLM needs of a host with GPUs beside its packages: what it compiles with at its start, and a driver.

    vllm_parts                                   a finding each
    check_compiler, check_header, check_driver   pure

Triton compiles the launcher of each kernel in C against Python's headers (triton/runtime/build.py); what needs nvcc
the engine turns off (docs/engines.md).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from dart_cli.config.rules import Finding
from dart_cli.doctor.machine import ask, ask_torch, list_gpus
from dart_cli.runtime.findings import error, ok

LEAST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> of the oldest NVIDIA driver that runs it. vLLM's own wheel is of CUDA 13."""


def vllm_parts() -> Iterator[Finding]:
    """Check what vLLM needs beside its packages; yields nothing where it has no GPU here, or runs on the CPU."""
    torch = ask_torch()
    if isinstance(torch, str) or not torch["cuda"] or not list_gpus()[0]:
        return
    yield check_compiler(os.environ.get("CC"))
    yield check_header(python_header())
    answer, fault = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if not fault and answer.strip():
        yield from check_driver(answer.split()[0], torch)


def check_compiler(chosen: str | None) -> Finding:
    """Judge the C compiler that Triton would take: CC where it is set (`chosen`), else gcc or clang."""
    names = [chosen] if chosen is not None else ["gcc", "clang"]
    compiler = next((path for each in names if (path := shutil.which(each))), None)
    if compiler is not None:
        return ok("compiler", f"{compiler}, for the kernels that vLLM compiles at its start")
    return error(
        "compiler",
        f"CC = {chosen} is not a program"
        if chosen is not None
        else "neither gcc nor clang is on PATH, and vLLM compiles the launchers of its kernels at its start",
        "unset CC, or name a C compiler" if chosen is not None else "apt install build-essential",
    )


def python_header() -> Path:
    """Return the path of Python.h where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's own, without the headers
        scheme = "posix_prefix"
    return Path(sysconfig.get_path("include", scheme)) / "Python.h"


def check_header(path: Path) -> Finding:
    """Judge whether Python.h is there."""
    if path.is_file():
        return ok("Python.h", f"{path}, for the kernels that vLLM compiles at its start")
    return error(
        "Python.h",
        f"{path} is missing, and vLLM compiles the launchers of its kernels with it",
        f"apt install python3-dev, or python{sys.version_info[0]}.{sys.version_info[1]}-dev for another Python "
        "than the system's",
    )


def check_driver(version: str, torch: dict[str, object]) -> Iterator[Finding]:
    """Judge the driver's version against the CUDA of torch; a torch that sees GPUs has found one that is enough."""
    least = LEAST_DRIVER.get(int(str(torch["cuda"]).partition(".")[0]))
    major = version.partition(".")[0]
    if least is None or not major.isdecimal():
        return
    if int(major) >= least or torch["gpus"]:
        yield ok("driver", f"{version}, for CUDA {torch['cuda']}")
    else:
        yield error(
            "driver",
            f"{version}, and CUDA {torch['cuda']} needs {least} or newer",
            f"install a driver of {least} or newer on the host, or rent a machine that has one",
        )
