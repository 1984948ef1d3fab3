"""The sampler over a whole vocabulary: seconds, memory and draws, against float64 throughout as before.

    python benchmarks/speed/sampler.py [--rows 8 64] [--draws 4000] [--out benchmarks/results/sampler.json]

Logits of V = 152,064 (Qwen2.5-VL), one CPU thread, its own seconds. Arms, each from the log-probabilities on: `float64`, the sampler as it was
and the reference of draws; `float32`, a plain running sum; `grouped`, the present one. A pass is a draw and an
entropy for every row; memory is the process's peak above its level before, each arm in a process of its own.
The limit is `read_ms`: the logits are read once. Draws are counted at three spreads of the logits: 0 (flat),
3, and 10 (nearly certain); and next to borders between tokens, at the distance named. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.engines import sampling

VOCABULARY = 152_064
SPREADS = (0.0, 3.0, 10.0)
NEAR = (1e-7, 1e-8, 1e-9)
ROUNDS = 7

Sampler = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def float64(logprobs: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As it was: probabilities, running sum and entropies in float64."""
    probabilities = logprobs.double().exp()
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, 0 * total))
    drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    shares = torch.where(probabilities > 0, probabilities * logprobs.double(), 0.0)
    return drawn.clamp(max=logprobs.shape[-1] - 1), -shares.sum(dim=-1)


def float32(logprobs: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All of it in float32."""
    probabilities = logprobs.exp()
    cumulative = probabilities.cumsum(dim=-1)
    goal = (uniform[:, None] * cumulative[:, -1:]).float()
    drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    return drawn.clamp(max=logprobs.shape[-1] - 1), -(probabilities * logprobs).sum(dim=-1)


def grouped(logprobs: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As it is."""
    probabilities = logprobs.exp()
    return sampling.draw(probabilities, uniform), sampling.entropies(probabilities, logprobs)


ARMS: dict[str, Sampler] = {"float64": float64, "float32": float32, "grouped": grouped}


def main() -> None:
    """Time every arm, count its draws, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--draws", type=int, default=4000, help="of each kind")
    parser.add_argument("--arm", help="internal: measure this arm alone, at --rows")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.arm:
        print(json.dumps(timed(arguments.arm, arguments.rows[0])))
        return
    result: dict[str, object] = {"vocabulary": VOCABULARY}
    for rows in arguments.rows:
        result[f"rows_{rows}"] = {arm: measured(arm, rows) for arm in ("read", *ARMS)}
    result["draws"] = arguments.draws
    result["other_draws_than_float64"] = {
        f"spread {spread:g}": others(spread, arguments.draws, None) for spread in SPREADS
    } | {f"{near:g} from a border": others(3.0, arguments.draws, near) for near in NEAR}
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def measured(arm: str, rows: int) -> dict[str, float]:
    """Return what `timed` finds in a process of its own."""
    command = [sys.executable, __file__, "--arm", arm, "--rows", str(rows)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def timed(arm: str, rows: int) -> dict[str, float]:
    """Milliseconds of a pass, and MiB that it takes beside the logits' log-probabilities."""
    logprobs, uniform = batch(rows, 3.0, 0)

    def read(logprobs: torch.Tensor, _: torch.Tensor) -> object:
        return logprobs.amax(dim=-1)

    work = ARMS.get(arm, read)
    work(logprobs[:1], uniform[:1])
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = memory("VmRSS")
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work(logprobs, uniform)
        seconds.append(time.process_time() - began)
    return {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "peak_mib": round((memory("VmHWM") - before) / 1024, 1),
    }


def memory(field: str) -> int:
    """KiB of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def batch(rows: int, spread: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [rows, V] and uniform numbers [rows]."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, VOCABULARY, generator=generator)
    return logits.log_softmax(dim=-1), torch.rand(rows, generator=generator, dtype=torch.float64)


def others(spread: float, draws: int, near: float | None) -> dict[str, int]:
    """How many draws of each arm are not the reference's; `near` a border between tokens, or anywhere."""
    found = dict.fromkeys(ARMS, 0)
    for seed in range(0, draws, ROUNDS * 8):
        logprobs, uniform = batch(8, spread, seed)
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        for repeat in range(ROUNDS):
            if near is None:
                uniform = torch.rand_like(uniform)
            else:
                place = torch.multinomial(logprobs.exp(), 1)
                sign = 1 if repeat % 2 else -1
                uniform = (cumulative.gather(1, place)[:, 0] / cumulative[:, -1]) + sign * near
                uniform = uniform.clamp(0, 1 - 1e-12)
            reference = float64(logprobs, uniform)[0]
            for arm, work in ARMS.items():
                found[arm] += int((work(logprobs, uniform)[0] != reference).sum())
    return found


if __name__ == "__main__":
    main()
