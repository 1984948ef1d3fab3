"""Plays episodes with OpenEnv's own client, for benchmarks/interop/with_openenv.py: in its interpreter.

    python openenv_client.py URL

Reads {"seed", "size", "points"} from a line, plays, and answers with {"reward", "reset_s", "step_s"}.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "envs" / "openenv"))

import no_mcp  # noqa: F401 - before the client, which imports what it stands in for
from openenv.core.generic_client import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]).sync() as client:
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        client.reset(seed=asked["seed"], size=asked["size"])
        told = {"reward": None, "reset_s": time.perf_counter() - began, "step_s": []}
        for x, y in asked["points"]:
            began = time.perf_counter()
            result = client.step({"kind": "click", "x": x, "y": y})
            told["step_s"].append(time.perf_counter() - began)
            told["reward"] = result.reward
            if result.done:
                break
        print(json.dumps(told), flush=True)
