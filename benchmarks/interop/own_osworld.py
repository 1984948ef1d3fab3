"""OSWorld's own side of the arm `osworld`: a program for an interpreter that has OSWorld's packages.

    python -c SOURCE CHECKOUT HOST PORT CHROMIUM_PORT VLC_PORT    (started by with_osworld.py)

A JSON line for each request on stdin, one with the answer on stdout: `reset` with a task file's content,
`step` with an action of OSWorld's, `evaluate`. The controllers, set-up and evaluation are those of OSWorld's
DesktopEnv, without its virtual machine: the guest runs already.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any


def desktop_env(checkout: str, host: str, ports: list[int]) -> Any:
    """OSWorld's environment around a guest that runs."""
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    from desktop_env.controllers.python import PythonController
    from desktop_env.controllers.setup import SetupController
    from desktop_env.desktop_env import DesktopEnv

    env = DesktopEnv.__new__(DesktopEnv)
    server, chromium, vlc = ports
    env.vm_ip, env.server_port, env.chromium_port, env.vlc_port = host, server, chromium, vlc
    env.os_type, env.enable_proxy, env.client_password = "Ubuntu", False, "password"
    env.screen_width, env.screen_height = 1920, 1080
    env.cache_dir_base, env.action_space = tempfile.mkdtemp(), "pyautogui"
    env.require_a11y_tree = env.require_terminal = env.is_environment_used = False
    env.controller = PythonController(vm_ip=host, server_port=server)
    env.setup_controller = SetupController(
        vm_ip=host,
        server_port=server,
        chromium_port=chromium,
        vlc_port=vlc,
        cache_dir=env.cache_dir_base,
        client_password=env.client_password,
        screen_width=env.screen_width,
        screen_height=env.screen_height,
    )
    return env


def answer(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One request."""
    if request["do"] == "reset":
        env._step_no, env.action_history = 0, []  # noqa: SLF001 - as its reset
        env._traj_no = getattr(env, "_traj_no", -1) + 1  # noqa: SLF001
        env._set_task_info(request["task"])  # noqa: SLF001
        env.setup_controller.reset_cache_dir(env.cache_dir)
        env.setup_controller.setup(env.config, False)
        return {"screenshot": bool(env.controller.get_screenshot())}
    if request["do"] == "step":
        env.step(request["action"], pause=request["pause_s"])
        return {}
    return {"score": float(env.evaluate())}


def main() -> None:
    """Answer until stdin ends; what OSWorld prints goes to stderr."""
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    env = desktop_env(sys.argv[1], sys.argv[2], [int(each) for each in sys.argv[3:6]])
    for line in sys.stdin:
        try:
            told = answer(env, json.loads(line))
        except Exception as error:  # noqa: BLE001 - an episode that broke
            told = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(told) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
