"""What vLLM's engine finds out without vLLM: causes, devices, sets that it cannot take."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bus.errors import ConfigError, EngineError, WeightsError
from dart_cli.config.schema import LoraConfig, VllmConfig
from dart_cli.doctor.plan import H100
from dart_cli.engines.vllm.set_files import PREFIX, AdapterVersions, open_files
from dart_cli.engines.vllm.start import (
    _check_precision,
    _environment,
    _features,
    _gpu_args,
    _memory_of,
    _recurrent_args,
    root_cause,
)
from tests.doctor.seven_b import config_of, plan_of, write_seven_b


def raised(text: str) -> BaseException:
    """An error that was raised while another was handled."""
    try:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError(
                "Engine core initialization failed. See root cause above."
            ) from error
    except RuntimeError as error:
        return error


def test_the_first_cause_is_one_line_with_what_to_change() -> None:
    told = root_cause(raised("CUDA out of memory.\nTried to allocate 20 GiB"))
    assert told.startswith("ValueError: CUDA out of memory. Tried to allocate 20 GiB")
    assert "vllm.gpu_memory_utilization" in told
    assert "kv_cache_memory_bytes" in root_cause(
        ValueError("Available memory on node 0 (1/14 GiB)")
    )
    assert "log" in root_cause(RuntimeError("Engine core initialization failed"))


FORCED = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""What exactness needs, whatever the user's shell has."""
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "OMP_NUM_THREADS": "3",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_vllms_processes_get_these_variables_and_a_users_own_where_exactness_permits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.environ", {})
    with _environment("auto", 3):
        assert os.environ == FORCED | DEFAULTS
    own = dict.fromkeys(FORCED | DEFAULTS, "theirs")
    monkeypatch.setattr("os.environ", dict(own))
    with _environment("auto", 3):
        assert os.environ == own | FORCED


def test_vllm_reads_these_variables_as_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = pytest.importorskip("vllm.envs", reason="vLLM is not installed: scripts/setup-vllm")
    for name, value in (FORCED | DEFAULTS).items():
        monkeypatch.setenv(name, value)
    assert envs.VLLM_USE_V2_MODEL_RUNNER is False
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is False
    assert envs.VLLM_ALLREDUCE_USE_FLASHINFER is False
    assert envs.VLLM_NO_USAGE_STATS is True
    unknown = {name for name in FORCED | DEFAULTS if name.startswith("VLLM_")} - set(dir(envs))
    assert not unknown  # a name that this version has not does nothing


@pytest.mark.parametrize(
    ("options", "dtype", "share", "expected"),
    [
        ({}, "bfloat16", 1, {"max_num_batched_tokens": 8192, "attention_backend": "FLASH_ATTN"}),
        ({}, "float32", 1, {"max_num_batched_tokens": 8192}),
        ({"attention_config": {}}, "bfloat16", 1, {"max_num_batched_tokens": 8192}),
        ({"enable_chunked_prefill": False}, "float32", 1, {"max_num_batched_tokens": 24_576}),
        ({"enable_chunked_prefill": True}, "float32", 1, {"max_num_batched_tokens": 8192}),
        (
            {},
            "float32",
            2,
            {
                "max_num_batched_tokens": 8192,
                "distributed_executor_backend": "mp",
                "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
            },
        ),
    ],
)
def test_on_a_gpu_batches_are_large_and_flashinfer_compiles_nothing(
    options: dict[str, Any], dtype: str, share: int, expected: dict[str, Any]
) -> None:
    config = VllmConfig(tensor_parallel=share, options=options)
    tuned = {"enable_flashinfer_autotune": False}
    assert _gpu_args(config, dtype, 32, 24_576) == expected | tuned
    own = VllmConfig(tensor_parallel=share, options=options | {"kernel_config": {}})
    assert _gpu_args(own, dtype, 32, 24_576) == expected
    assert (
        _gpu_args(config, dtype, 9000, 512)["max_num_batched_tokens"] == 9000
    )  # rollout.max_batch


def test_recurrent_layers_have_exact_states_and_a_cache_of_them_unless_prompts_are_read_whole() -> (
    None
):
    always = {"mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton"}
    cached = {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "prefix_match_unit": 16,
    }
    whole = dict.fromkeys(cached, False) | {"prefix_match_unit": None}
    assert _recurrent_args(VllmConfig()) == always | cached
    options = {"enable_chunked_prefill": False}
    assert _recurrent_args(VllmConfig(options=options)) == always | whole


def test_on_a_gpu_recurrent_layers_in_float32_are_refused(tmp_path: Path) -> None:
    for kind in ("qwen3_5", "qwen3_vl"):
        (tmp_path / kind).mkdir()
        vision = {"out_hidden_size": 4096}
        config = {"model_type": kind, "text_config": {}, "vision_config": vision}
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    recurrent: Any = SimpleNamespace(folder=tmp_path / "qwen3_5")
    with pytest.raises(ConfigError, match=r"float32.*qwen3_5 in half precision alone; set \"bf"):
        _check_precision(recurrent, "float32")
    _check_precision(recurrent, "bfloat16")
    attending: Any = SimpleNamespace(folder=tmp_path / "qwen3_vl")
    _check_precision(attending, "float32")


def test_the_engine_keeps_as_many_screens_features_as_doctor_plans(tmp_path: Path) -> None:
    policy: Any = SimpleNamespace(folder=write_seven_b(tmp_path / "7b"), max_positions=128_000)
    for sections in ({}, {"vllm": {"max_model_len": 24_576}}, {"up": {"rollouts": 1}}):
        planned = plan_of(**sections).engine
        assert planned is not None
        shown = planned.screens * 2691 + (2690 if sections else 0)
        kept, share = _features(policy, config_of(**sections).vllm, "bfloat16", H100.memory, shown)
        assert kept // 2691 == planned.screens
        assert share * H100.memory == pytest.approx(planned.features, abs=2691 * 7168)
    sized = VllmConfig(gpu_memory_utilization=0.1, options={"kv_cache_memory_bytes": 2 * 10**10})
    kept, share = _features(policy, sized, "bfloat16", H100.memory, 10**6)
    assert kept
    assert share == 0  # what features take is not taken from a cache that has its own size
    kept, share = _features(policy, VllmConfig(), "float32", 0, 10**6)  # on a CPU
    assert (kept, share) == (512 * 2**20 // 6 // (4 * 3584), 0.0)


def test_a_gpu_whose_memory_cannot_be_read_is_one_line() -> None:
    class Broken:
        def get_device_total_memory(self) -> int:
            raise OSError("Driver/library version mismatch")

    with pytest.raises(EngineError, match=r"the memory of the GPU: .*mismatch; see `nvidia-smi`"):
        _memory_of(Broken())


@pytest.mark.parametrize("chosen", [None, "4,6"])
def test_vllms_processes_see_one_gpu_and_this_one_sees_all_afterwards(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    seen = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    monkeypatch.setattr("os.environ", dict(seen))
    with _environment("cuda:1", 1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ("1" if chosen is None else "6")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == chosen


def test_a_set_that_is_removed_while_it_is_open_is_read_all_the_same(tmp_path: Path) -> None:
    names = ("frozen.safetensors", "model.safetensors")
    for name in names:
        (tmp_path / name).write_text(name)
    with open_files(tmp_path) as files:
        for name in names:
            (tmp_path / name).unlink()
        assert sorted(Path(file).read_text() for file in files) == list(names)


def test_a_set_that_has_gone_is_an_error_and_no_empty_update(tmp_path: Path) -> None:
    with (
        pytest.raises(WeightsError, match="removed while it was read"),
        open_files(tmp_path / "gone"),
    ):
        pass


def test_folders_of_adapters_go_with_the_processes_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale, begun = tmp_path / f"{PREFIX}stale", tmp_path / f"{PREFIX}begun"
    for folder in (stale, begun):
        folder.mkdir()
    (stale / "lock").touch()
    first = AdapterVersions(LoraConfig(), tmp_path, 2)
    second = AdapterVersions(LoraConfig(), tmp_path, 2)
    left = sorted(tmp_path.iterdir())
    assert len(left) == 3
    assert begun in left  # it has no lock yet
    for each in (first, second):
        each.close()
    assert list(tmp_path.iterdir()) == [begun]
