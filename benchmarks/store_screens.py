"""What encodings of screenshots cost, and what a lossy one does to a policy.

    python benchmarks/store_screens.py [--suites desk desktop miniwob] [--out benchmarks/results/store_screens.json]

bytes    real screens of each suite, as the oracle or a few clicks pass through them, in 1920x1080: bytes,
         and milliseconds to encode and to decode, for PNG as the suite gives it and each lossy encoding
policy   the quickstart's tiny model, which was never trained on lossy screens, plays held-out seeds of
         suite `mini` with each encoding, in one process: success, with Wilson's 95 % interval, and the
         mean absolute difference of the log-probabilities that it gives to the same completions on the
         same states, PNG against the encoding. The second arm of PNG has other sampling seeds: the noise.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from PIL import Image

from bus.errors import DartError
from dart_cli.policy.forward import image_features, logits, masked_logprobs
from dart_cli.policy.model import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from envs.actions import Click
from envs.base import Observation
from envs.registry import load_suite, make_env
from envs.screenshots import ScreenFormat

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"
FORMATS = {
    "png": ScreenFormat(),
    "webp lossless": ScreenFormat("webp", 100),
    "webp 90": ScreenFormat("webp", 90),
    "webp 75": ScreenFormat("webp", 75),
    "jpeg 90": ScreenFormat("jpeg", 90),
    "jpeg 75": ScreenFormat("jpeg", 75),
}
FULL_HD: dict[str, dict[str, Any]] = {
    "desk": {"size": "1920x1080"},
    "desktop": {"size": "1920x1080"},
    "miniwob": {"scale": 5.0},  # 800x1050, its largest are 8
}
COMPLETION = "click(500,500)"


def main() -> None:
    """Measure, print what is measured, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of encodings of screenshots.")
    parser.add_argument("--suites", nargs="*", default=list(FULL_HD), choices=list(FULL_HD))
    parser.add_argument("--screens", type=int, default=16, help="of each suite")
    parser.add_argument("--episodes", type=int, default=420, help="of each arm of the policy")
    parser.add_argument(
        "--states", type=int, default=64, help="whose log-probabilities are compared"
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    asked = parser.parse_args()
    sizes = {suite: measure_suite(suite, asked.screens) for suite in asked.suites}
    result = {
        "benchmark": "store_screens",
        "baseline": "png, as the suite gives it",
        "limit": "jpeg 75: the fewest bytes",
        "suites": sizes,
        "logprobs": measure_logprobs(asked.states),
        "success": measure_success(asked.episodes) if asked.episodes else {},
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


# --- bytes and milliseconds ---------------------------------------------------------------------


def measure_suite(suite: str, count: int) -> dict[str, Any]:
    """Of each encoding of real screens: medians of bytes, and of milliseconds."""
    try:
        screens = list(islice(screens_of(suite, FULL_HD[suite]), count))
    except DartError as error:
        print(f"{suite}: not measured: {error}")
        return {"not_measured": str(error)}
    size = f"{screens[0].width}x{screens[0].height}"
    found: dict[str, Any] = {"size": size, "screens": len(screens)}
    for name, form in FORMATS.items():
        encoded = [timed(form.of, screen) for screen in screens]
        blobs = [each.screenshot for _, each in encoded]
        found[name] = {
            "kb": round(statistics.median(map(len, blobs)) / 1e3, 1),
            "encode_ms": round(statistics.median(ms for ms, _ in encoded), 1),
            "decode_ms": round(statistics.median(timed(decoded, b)[0] for b in blobs), 1),
        }
        print(f"{suite} {size} {name:8}", found[name])
    return found


def screens_of(suite: str, options: dict[str, Any]) -> Any:
    """Screens of one task after another: the first, and those after a few actions."""
    env = make_env(suite, **options)
    try:
        tasks = [task for task in load_suite(suite).tasks.values() if task.split == "train"]
        for seed, task in enumerate(tasks[:: max(1, len(tasks) // 8)]):
            seen, _ = env.reset(seed=seed, options={"task": task})
            yield seen
            for place in (0.3, 0.6):
                action: Any = Click(x=int(place * seen.width), y=int(place * seen.height))
                if suite == "desk":
                    action = env.oracle_action()  # type: ignore[attr-defined]
                seen, _, terminated, truncated, _ = env.step(action)
                yield seen
                if terminated or truncated:
                    break
    finally:
        env.close()


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Milliseconds, and what it returned."""
    began = time.perf_counter()
    found = work(*arguments)
    return 1e3 * (time.perf_counter() - began), found


def decoded(encoded: bytes) -> Image.Image:
    """As policy and trainer do it."""
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")


# --- what it does to a policy -------------------------------------------------------------------


def measure_logprobs(states: int) -> dict[str, Any]:
    """Of the oracle's completion on the same states: the mean absolute difference to PNG, nats."""
    policy = load_policy("builtin:tiny")
    renderer = PromptRenderer(policy)
    env = make_env("mini")
    differences: dict[str, list[float]] = {name: [] for name in FORMATS if name != "png"}
    completion = policy.encode_completion(COMPLETION)
    tasks = [task for task in load_suite("mini").tasks.values() if task.split == "train"]
    for seed in range(states):
        seen, info = env.reset(seed=1_000_000 + seed, options={"task": tasks[seed % len(tasks)]})
        plain = logprobs(policy, renderer, info["instruction"], seen, completion)
        for name, values in differences.items():
            lossy = FORMATS[name].of(seen)
            other = logprobs(policy, renderer, info["instruction"], lossy, completion)
            values += [abs(a - b) for a, b in zip(plain, other, strict=True)]
    env.close()
    found = {
        name: {
            "mean_abs": round(statistics.fmean(values), 4),
            "median_abs": round(statistics.median(values), 4),
            "largest": round(max(values), 3),
            "tokens": len(values),
        }
        for name, values in differences.items()
    }
    print("log-probabilities", found)
    return found


def logprobs(
    policy: LoadedPolicy,
    renderer: PromptRenderer,
    instruction: str,
    seen: Observation,
    completion: list[int],
) -> list[float]:
    """Of each token of the completion, nats."""
    prompt = renderer.render(instruction, [], seen.screenshot)
    inputs = policy.inputs([[*prompt.token_ids, *completion]], [prompt.images])
    with torch.inference_mode():
        features = image_features(policy.model, inputs.images)
        values = logits(policy.model, inputs, last=len(completion) + 1, features=features)
    rows = masked_logprobs(values[0, :-1], policy.forbidden(torch.device("cpu")), 1.0)
    return [float(row[token]) for row, token in zip(rows, completion, strict=True)]


def measure_success(episodes: int) -> dict[str, Any]:
    """Held-out success of the frozen model, as `dart eval` plays it, sampled and greedy."""
    arms = {name: [f"env.screenshots={f.encoding}", f"env.screenshot_quality={f.quality}"]
            for name, f in FORMATS.items()}  # fmt: skip
    arms["png, other seeds"] = ["eval.seed=2000000"]
    found = {}
    for name, settings in arms.items():
        with tempfile.TemporaryDirectory(prefix="screens-") as folder:
            command = [sys.executable, "-m", "dart_cli", "eval", str(QUICKSTART), "--json"]
            command += ["--episodes", str(episodes), "--set", f"run.dir={folder}/run"]
            command += [part for each in settings for part in ("--set", each)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        whole = json.loads(done.stdout.splitlines()[-1])
        found[name] = {
            mode: [round(number, 3) for number in (part["success"], *part["interval"])]
            for mode in ("sampled_tasks", "greedy_tasks")
            for part in [whole[mode]]
        }
        print(name, found[name])
    return found


if __name__ == "__main__":
    main()
