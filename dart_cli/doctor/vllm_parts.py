"""Check what vLLM needs on a host with GPUs beside its packages: a C compiler, Python's headers, a driver.

    vllm_parts                                   measures, and yields one finding for each
    check_compiler, check_header, check_driver   return the findings (pure)

Triton compiles a launcher in C for each kernel, with Python's headers (triton/runtime/build.py). The engine
turns off what would need nvcc (docs/engines.md).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from dart_cli.config.rules import Finding
from dart_cli.doctor.machine import ask_torch, list_gpus, run_program
from dart_cli.runtime.findings import error, ok

LEAST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> major version of its oldest NVIDIA driver. vLLM's own wheel needs CUDA 13."""


def vllm_parts() -> Iterator[Finding]:
    """Yield a finding for each thing that vLLM needs; nothing if torch has no CUDA or there is no GPU."""
    torch = ask_torch()
    if isinstance(torch, str) or not torch["cuda"] or not list_gpus()[0]:
        return
    yield check_compiler(os.environ.get("CC"))
    yield check_header(python_header())
    answer, fault = run_program(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    )
    if not fault and answer.strip():
        yield from check_driver(answer.split()[0], torch)


def check_compiler(cc: str | None) -> Finding:
    """Check the C compiler that Triton would use: the variable CC (`cc`) if it is set, else gcc or clang."""
    names = [cc] if cc is not None else ["gcc", "clang"]
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is not None:
        return ok("compiler", f"{compiler}, for the kernels that vLLM compiles at its start")
    return error(
        "compiler",
        f"CC = {cc} is not a program"
        if cc is not None
        else "neither gcc nor clang is on PATH, and vLLM compiles the launchers of its kernels at its start",
        "unset CC, or name a C compiler" if cc is not None else "apt install build-essential",
    )


def python_header() -> Path:
    """Return the path at which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's own scheme, which has no headers
        scheme = "posix_prefix"
    return Path(sysconfig.get_path("include", scheme)) / "Python.h"


def check_header(path: Path) -> Finding:
    """Check whether Python.h exists."""
    if path.is_file():
        return ok("Python.h", f"{path}, for the kernels that vLLM compiles at its start")
    return error(
        "Python.h",
        f"{path} is missing, and vLLM compiles the launchers of its kernels with it",
        f"apt install python3-dev, or python{sys.version_info[0]}.{sys.version_info[1]}-dev for another Python "
        "than the system's",
    )


def check_driver(version: str, torch: dict[str, object]) -> Iterator[Finding]:
    """Compare the driver's version with torch's CUDA.

    If torch sees GPUs, the driver is new enough in any case.
    """
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
            f"install driver {least} or newer on the host, or rent a machine that has one",
        )
