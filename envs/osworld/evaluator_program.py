"""The program that runs scores and set-up steps of OSWorld's own package, `desktop_env`.

Runs as `python -c SOURCE` in an interpreter that has that package (it pins versions that dart cannot
run with) and speaks JSON lines: a request on stdin, an answer on the original stdout. Never imported.

    {"do": "score", "guest": {...}, "folder": ..., "check": {...}}  ->  {"score": 0.0 to 1.0}
    {"do": "setup", "guest": {...}, "folder": ..., "step": {...}}   ->  {"score": 1.0}
    any error                                                       ->  {"error": "one line"}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cached_property
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Perform the request; an exception becomes an answer, too."""
    try:
        guest = DesktopEnvView(request["guest"], request["folder"])
        if request["do"] == "setup":
            step = request["step"]
            perform = getattr(guest.setup_controller, "_" + step["type"] + "_setup")
            perform(**step["parameters"])
            return {"score": 1.0}
        return {"score": float(score(guest, request["check"]))}
    except Exception as error:  # noqa: BLE001 - whatever an evaluator raises makes its episode invalid
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


class DesktopEnvView:
    """What getters use of OSWorld's DesktopEnv: the guest's address, its controllers, a folder."""

    current_use_proxy = False

    def __init__(self, address: dict[str, Any], folder: str) -> None:
        self.vm_ip = address["host"]
        self.server_port = address["server_port"]
        self.chromium_port = address["chromium_port"]
        self.vlc_port = address["vlc_port"]
        self.cache_dir = folder
        controllers = importlib.import_module("desktop_env.controllers.python")
        self.controller = controllers.PythonController(self.vm_ip, self.server_port)

    @cached_property
    def setup_controller(self) -> Any:
        """OSWorld's own; its import is slow, and may miss a package that no evaluator needs."""
        module = importlib.import_module("desktop_env.controllers.setup")
        return module.SetupController(
            self.vm_ip,
            self.server_port,
            self.chromium_port,
            self.vlc_port,
            cache_dir=self.cache_dir,
            client_password="password",
        )

    @cached_property
    def vm_platform(self) -> Any:
        """`Linux`, `Windows` or `Darwin`."""
        return self.controller.get_vm_platform()

    @cached_property
    def vm_screen_size(self) -> Any:
        """{"width": ..., "height": ...}, pixels."""
        return self.controller.get_vm_screen_size()


def score(guest: DesktopEnvView, check: dict[str, Any]) -> Any:
    """One metric of one result; a missing file is a wrong result."""
    getters = importlib.import_module("desktop_env.evaluators.getters")
    metrics = importlib.import_module("desktop_env.evaluators.metrics")

    def value_of(getter: dict[str, Any]) -> Any:
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


if __name__ == "__main__":
    # Getters and metrics print: the original stdout is kept for answers, and stdout becomes stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
