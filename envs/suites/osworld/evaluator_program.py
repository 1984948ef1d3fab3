"""The program that runs scores and set-up steps of OSWorld's own package, `desktop_env`.

It is run as `python -c SOURCE`, and never imported, in an interpreter that has the package, which pins
versions that dart cannot run with. It reads requests as JSON lines from stdin and writes answers to the
original stdout.

    {"do": "score", "guest": {...}, "folder": ..., "check": {...}, ...}  ->  {"score": 0.0 to 1.0}
    {"do": "setup", "guest": {...}, "folder": ..., "step": {...}, ...}   ->  {"score": 1.0}
    {"do": "parts"}  ->  {"getters": [names], "metrics": [names], "steps": [names], ...}
    any error        ->  {"error": "one line"}
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Perform a request and return the answer; an exception is an answer as well."""
    try:
        if request["do"] == "parts":
            return parts()
        guest = DesktopEnvView(request)
        if request["do"] == "setup":
            step = request["step"]
            perform = getattr(guest.setup_controller, "_" + step["type"] + "_setup")
            perform(**step["parameters"])
            return {"score": 1.0}
        return {"score": float(score(guest, request["check"], request["references"]))}
    except Exception as error:  # noqa: BLE001 - any error of an evaluator makes its episode invalid
        return {"error": one_line(error)}


def one_line(error: Exception) -> str:
    """Return the error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


class DesktopEnvView:
    """The attributes of OSWorld's DesktopEnv that getters read: address, controllers, folder."""

    current_use_proxy = False
    enable_proxy = False

    def __init__(self, request: dict[str, Any]) -> None:
        address = request["guest"]
        self.vm_ip = address["host"]
        self.server_port = address["server_port"]
        self.chromium_port = address["chromium_port"]
        self.vlc_port = address["vlc_port"]
        self.cache_dir = request["folder"]
        self.client_password = request["password"]
        self.screen_width, self.screen_height = request["screen"]
        controllers = importlib.import_module("desktop_env.controllers.python")
        self.controller = controllers.PythonController(self.vm_ip, self.server_port)

    @cached_property
    def setup_controller(self) -> Any:
        """OSWorld's set-up controller. Its import is slow, and may miss a package that no evaluator needs."""
        module = importlib.import_module("desktop_env.controllers.setup")
        sizes = {"screen_width": self.screen_width, "screen_height": self.screen_height}
        # An older SetupController does not take a screen size.
        if "screen_width" not in inspect.signature(module.SetupController).parameters:
            sizes = {}
        return module.SetupController(
            self.vm_ip,
            self.server_port,
            self.chromium_port,
            self.vlc_port,
            cache_dir=self.cache_dir,
            client_password=self.client_password,
            **sizes,
        )

    @cached_property
    def vm_platform(self) -> Any:
        """`Linux`, `Windows` or `Darwin`."""
        return self.controller.get_vm_platform()

    @cached_property
    def vm_machine(self) -> Any:
        """The processor's kind, e.g. `x86_64`."""
        return self.controller.get_vm_machine()

    @cached_property
    def vm_screen_size(self) -> Any:
        """The screen's size as {"width": ..., "height": ...}, pixels."""
        return self.controller.get_vm_screen_size()


def score(guest: DesktopEnvView, check: dict[str, Any], references: str) -> Any:
    """Return the score of one check; a missing file is a wrong result.

    `references` is the folder that has the files of `cloud_file` already.
    """
    getters = importlib.import_module("desktop_env.evaluators.getters")
    metrics = importlib.import_module("desktop_env.evaluators.metrics")
    folder = guest.cache_dir

    def value_of(getter: dict[str, Any]) -> Any:
        guest.cache_dir = references if getter["type"] == "cloud_file" else folder
        return getattr(getters, "get_" + getter["type"])(guest, getter)

    metric = getattr(metrics, check["func"])
    values = []
    if check["result"] is not None:
        try:
            values.append(value_of(check["result"]))
        except FileNotFoundError:
            return 0.0
    if check["expected"] is not None:
        values.append(value_of(check["expected"]))
    return metric(*values, **check["options"])


def parts() -> dict[str, Any]:
    """Return what the installation has, by the names of task files, and which unknown attributes it reads."""
    getters = importlib.import_module("desktop_env.evaluators.getters")
    metrics = importlib.import_module("desktop_env.evaluators.metrics")
    folder = Path(str(getters.__file__)).parent
    names: dict[str, Any] = {
        "folder": str(folder.parents[2]),
        "getters": [name[len("get_") :] for name in dir(getters) if name.startswith("get_")],
        "metrics": dir(metrics),
        "steps": [],
        "unknown": unknown_attributes(folder),
    }
    try:
        controller = importlib.import_module("desktop_env.controllers.setup").SetupController
    except Exception as error:  # noqa: BLE001 - reported only if a task needs a set-up step
        names["no_steps"] = one_line(error)
    else:
        names["steps"] = [
            name.removeprefix("_").removesuffix("_setup")
            for name in dir(controller)
            if name.startswith("_") and name.endswith("_setup")
        ]
    return names


def unknown_attributes(folder: Path) -> list[str]:
    """Return `file.py: env.attribute` for each attribute that getters read and DesktopEnvView lacks."""
    own = {"vm_ip", "server_port", "chromium_port", "vlc_port", "cache_dir", "controller"}
    own |= {"client_password", "screen_width", "screen_height", *vars(DesktopEnvView)}
    return sorted(
        {
            f"{path.name}: env.{node.attr}"
            for path in folder.glob("*.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "env"
            and node.attr not in own
        }
    )


if __name__ == "__main__":
    # Getters and metrics print: keep the original stdout for answers, and let stdout be stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
