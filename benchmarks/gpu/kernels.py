"""The checks of scripts/gpu-check that need no model.

machine     what this is, and what its arithmetic and memory reach
attention   packed (varlen), trees and a dense mask give the same
tests       the tests marked `gpu`
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.settings import (
    ROOT,
    BrokenError,
    Clock,
    Figures,
    MissedError,
    Settings,
    relative,
)

# --- machine --------------------------------------------------------------------------------------


def machine(settings: Settings) -> Figures:
    """Return the names, the memory, and the speeds that limit all other checks."""
    figures: Figures = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "shared_memory_gb": round(shutil.disk_usage(settings.scratch).free / 1e9, 1),
    }
    device, side = settings.device, 256 if settings.tiny else 8192
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise MissedError(
                "torch sees no CUDA device; --device cpu --tiny checks the code itself"
            )
        about = torch.cuda.get_device_properties(device)
        figures |= {
            "gpu": about.name,
            "gpus": torch.cuda.device_count(),
            "gpu_gb": round(about.total_memory / 1e9, 1),
            "capability": f"{about.major}.{about.minor}",
            "cuda": torch.version.cuda,
        }
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    one @ one
    clock, times = Clock(device), 10
    for _ in range(times):
        one @ one
    figures["matmul_tflops"] = round(2 * times * side**3 / clock.lap() / 1e12, 3)
    host = torch.empty(1 << (20 if settings.tiny else 30), dtype=torch.uint8)
    if device.startswith("cuda"):
        host = host.pin_memory()
    for name, move in (("to_device_gb_s", host.to), ("from_device_gb_s", host.to(device).to)):
        target = device if name.startswith("to") else "cpu"
        move(target)
        clock.lap()
        move(target)
        figures[name] = round(host.numel() / max(clock.lap(), 1e-9) / 1e9, 2)
    return figures


# --- attention ------------------------------------------------------------------------------------


def attention(settings: Settings) -> Figures:
    """Compare trees, each path alone, and a dense mask in float32, by values and gradients."""
    from dart_cli.policy.pack_plan import PackLayout, plan_pack
    from dart_cli.policy.packed import packed_attention

    device = settings.device
    on_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    limit = 0.02 if on_gpu else 1e-5
    heads, kv_heads, width = (28, 4, 128) if on_gpu else (4, 2, 16)
    scale = 37 if on_gpu else 1
    layouts = {
        "chain": PackLayout((0, 60 * scale), (-1,)),
        "tree": PackLayout(
            tuple(scale * each for each in (0, 20, 23, 41, 42, 57)), (-1, 0, 0, 2, -1)
        ),
    }
    figures: Figures = {"dtype": str(dtype), "kernel": "varlen_attn" if on_gpu else "bucketed sdpa"}
    torch.manual_seed(0)
    for name, layout in layouts.items():
        q, k, v = (
            torch.randn(layout.length, count, width, device=device, dtype=dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        weight = torch.randn(layout.length, heads, width, device=device)
        sets = [tuple(part.clone().requires_grad_() for part in (q, k, v)) for _ in range(3)]
        plan = plan_pack(layout, torch.device(device), dtype)
        outs = [packed_attention(*sets[0], plan, None).float()]
        outs.append(_paths_alone(layout, sets[1], packed_attention, plan_pack).float())
        wide = [part.detach().float().requires_grad_() for part in (q, k, v)]
        outs.append(_dense(layout, wide))
        for out in outs:
            (out * weight).sum().backward()
        grads = [[part.grad for part in group] for group in (sets[0], sets[1], wide)]
        for other, label in ((1, "alone"), (2, "dense")):
            figures[f"{name}_{label}"] = relative(outs[0], outs[other])
            figures[f"{name}_{label}_gradients"] = max(
                relative(one, two) for one, two in zip(grads[0], grads[other], strict=True)
            )
    worst = max(value for value in figures.values() if isinstance(value, float))
    if not worst <= limit:
        raise BrokenError(
            f"a relative difference of {worst:.2g}, at most {limit:g} is allowed", figures
        )
    return figures | _speed(device, dtype, heads, kv_heads, width, tiny=settings.tiny)


def _dense(layout: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the reference: float32, an L x L mask, keys repeated for each head."""
    length = layout.length
    mask = torch.zeros(length, length, dtype=torch.bool, device=parts[0].device)
    for node in range(len(layout.parents)):
        path = layout.path(node).to(mask.device)
        own = layout.starts[node + 1] - layout.starts[node]
        rows = path[-own:]
        visible = torch.ones(own, len(path), dtype=torch.bool, device=mask.device)
        mask[rows[:, None], path] = visible.tril(diagonal=len(path) - own)
    groups = parts[0].shape[1] // parts[1].shape[1]
    q = parts[0].transpose(0, 1)[None]
    k, v = (part.repeat_interleave(groups, dim=1).transpose(0, 1)[None] for part in parts[1:])
    out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out[0].transpose(0, 1)


def _paths_alone(layout: Any, parts: Any, attend: Any, plan_pack: Any) -> torch.Tensor:
    """Compute each node as the end of a separate sequence."""
    from dart_cli.policy.pack_plan import PackLayout

    rows = []
    for node in range(len(layout.parents)):
        path = layout.path(node).to(parts[0].device)
        own = layout.starts[node + 1] - layout.starts[node]
        alone = PackLayout((0, len(path)), (-1,))
        plan = plan_pack(alone, parts[0].device, parts[0].dtype)
        rows.append(attend(*(part[path] for part in parts), plan, None)[-own:])
    return torch.cat(rows)


def _speed(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int, *, tiny: bool
) -> Figures:
    """Return the milliseconds of a forward and backward pass over one long sequence, packed and with a mask."""
    from dart_cli.policy.pack_plan import PackLayout, plan_pack
    from dart_cli.policy.packed import packed_attention

    length = 128 if tiny else 8192
    layout = PackLayout((0, length), (-1,))
    plan = plan_pack(layout, torch.device(device), dtype)
    parts = [
        torch.randn(length, count, width, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def masked() -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    figures: Figures = {"tokens": length}
    for name, run in (
        ("packed_ms", lambda: packed_attention(*parts, plan, None)),
        ("masked_ms", masked),
    ):
        run().sum().backward()
        clock = Clock(device)
        for _ in range(3):
            run().sum().backward()
        figures[name] = round(1000 * clock.lap() / 3, 2)
    return figures


# --- the tests ------------------------------------------------------------------------------------


def tests(settings: Settings) -> Figures:
    """Run the tests marked `gpu`; on a CPU they are only collected."""
    for name in ("pytest", "pytest_timeout", "hypothesis"):  # pyproject.toml, tests/conftest.py
        if find_spec(name) is None:
            raise MissedError(f"{name} is not installed")
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"marks?\b.*\bgpu\b|mark\.gpu\b", path.read_text(encoding="utf-8"))
    )
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark"]  # that plugin's warnings are errors here
    command += ["--timeout=60", "-rs", "--continue-on-collection-errors"]
    on_gpu = settings.device.startswith("cuda")
    command += files if on_gpu else ["--collect-only", *files]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    return {"files": files} | judged(
        process.returncode, f"{process.stderr}\n{process.stdout}", on_gpu=on_gpu
    )


OUTCOMES = ("passed", "failed", "errors", "skipped", "deselected")


def judged(returncode: int, output: str, *, on_gpu: bool) -> Figures:
    """Return pytest's counts. Raises BrokenError where a test failed or none ran, MissedError if none could."""
    lines = [line for line in output.splitlines() if line.strip()]
    summary = lines[-1] if lines else ""
    counts = dict.fromkeys(OUTCOMES, 0)
    for number, name in re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected)", summary):
        counts["errors" if name == "error" else name] = int(number)
    figures: Figures = dict(counts)
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lacking = sorted(set(re.findall(r"No module named '([\w.]+)'", output)))
    if not on_gpu:
        collected = re.search(r"(\d+)(?:/\d+)? tests? collected", summary)
        count = int(collected[1]) if collected else 0
        if returncode and not lacking:
            raise BrokenError(f"pytest ended with {returncode} and collected {count}", figures)
        text += f"; not installed: {', '.join(lacking)}" if lacking else ""
        raise MissedError(f"no CUDA device: {count} collected, none run ({text})")
    if counts["failed"] or (returncode not in (0, 5) and not lacking):
        raise BrokenError(f"pytest ended with {returncode}: {' '.join(lines[-8:])[-800:]}", figures)
    if lacking and not counts["passed"]:
        raise MissedError(f"no test was run; not installed: {', '.join(lacking)}")
    if not counts["passed"]:
        raise BrokenError(f"no test was run ({text or summary})", figures)
    return figures | ({"not_installed": lacking} if lacking else {})
