"""BrowserGym's own loop for `benchmarks/interop/with_browsergym.py`; runs in BrowserGym's interpreter.

{"do": "reset", "task", "seed", "chromium", "pause_s"} and {"do": "step", "action"}, a JSON line each.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any


def with_binary(playwright: Any, chromium: str) -> None:
    """Every browser that BrowserGym starts is the installed one; its chat has no option for that."""
    launch = playwright.chromium.launch
    playwright.chromium.launch = lambda **asked: launch(**{**asked, "executable_path": chromium})


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import browsergym.core
    import browsergym.miniwob  # registers its tasks
    import gymnasium
    from browsergym.core.action.highlevel import HighLevelActionSet

    mapping = HighLevelActionSet(["coord", "chat", "infeas", "nav", "tab"]).to_python_code
    env, patched = None, False
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "reset":
                if not patched:
                    playwright = browsergym.core._get_global_playwright()  # noqa: SLF001 - no other name
                    with_binary(playwright, asked["chromium"])
                    patched = True
                if env is not None:
                    env.close()
                given = {"action_mapping": mapping}
                if asked["pause_s"] is not None:
                    given |= {"slow_mo": 0, "pre_observation_delay": asked["pause_s"]}
                env = gymnasium.make(
                    f"browsergym/{asked['task']}", disable_env_checker=True, **given
                )
                observation, _ = env.reset(seed=asked["seed"])
                pixels = observation["screenshot"]
                answer = {"screen": hashlib.sha256(pixels.tobytes()).hexdigest()}
            else:
                _, reward, ended, _, _ = env.step(asked["action"])
                answer = {"reward": float(reward), "ended": bool(ended)}
        except Exception as error:  # noqa: BLE001 - the other side counts it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


main()
