"""Promises of the one module that names a vendor."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import torch

from dart_cli.hardware import accelerator
from dart_cli.policy.loader import load_policy

ROOT = Path(__file__).resolve().parents[2]
ITSELF = "dart_cli/hardware/accelerator.py"

NAMES = {
    "dart_cli/config/devices.py": "how CUDA reads a list of GPUs, and what a configuration calls a device; no torch there",
    "dart_cli/config/load.py": "an error that says what a device may be",
    "dart_cli/config/schema/base.py": "what a configuration calls a device",
    "dart_cli/config/schema/rollout.py": "what a configuration calls a device",
    "dart_cli/config/schema/train.py": "what a configuration calls a device",
    "dart_cli/config/rules/machine.py": "rules of what a configuration calls a device; no torch there",
    "dart_cli/config/rules/policy.py": "an error that names the configured device",
    "dart_cli/cluster/demands.py": "what a configuration calls a device; no torch there",
    "dart_cli/doctor/fit.py": "a fix that names a device; no torch there",
    "dart_cli/engines/vllm/models.py": "what vLLM's CUDA graphs and kernels need of a class",
    "dart_cli/hardware/device.py": "an error whose fix is a CUDA build of torch",
    "dart_cli/doctor/vllm_parts.py": "the driver that a version of CUDA needs; no torch there",
    "dart_cli/engines/vllm/room.py": "the memory of a CUDA context, which is assumed; no torch there",
    "dart_cli/doctor/machine.py": "asks the torch of a process of its own, and compares it with nvidia-smi",
    "dart_cli/engines/vllm/start.py": "CUDA_VISIBLE_DEVICES, which vLLM's processes read",
    "dart_cli/train/ranks/distributed.py": "an error that names the configured device",
}
"""Modules beside it that say `cuda`, and why."""


def modules() -> dict[str, str]:
    found = [path for room in ("dart_cli", "bus", "envs") for path in (ROOT / room).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}


def test_no_other_module_uses_a_vendors_part_of_torch() -> None:
    vendor = re.compile(
        r"torch\.(cuda|xpu|mps|mtia|backends)\b|from torch import .*\bcuda\b|\.is_cuda\b|\.cuda\(|pin_memory\("
        r"|ProcessGroupNCCL|\bimport triton\b"
    )
    using = {name for name, text in modules().items() if vendor.search(text)}
    assert using == {ITSELF, "dart_cli/doctor/machine.py"}


def test_every_module_that_says_cuda_has_a_reason() -> None:
    saying = {name for name, text in modules().items() if re.search(r"\bcuda\b", text, re.I)}
    assert saying - {ITSELF} <= NAMES.keys()
    stale = NAMES.keys() - {name for name, text in modules().items() if "cuda" in text.lower()}
    assert not stale


def test_the_page_on_hardware_lists_its_functions() -> None:
    tree = ast.parse(inspect.getsource(accelerator))
    own = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    page = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
    section = page.partition("## What needs a GPU")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    assert named == {name for name in own if not name.startswith("_")}


def test_a_loaded_model_makes_no_plan_for_each_length() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_policy("builtin:tiny")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
