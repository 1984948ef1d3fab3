"""Our extensions of vLLM, installed in each of its processes when this module is imported.

vLLM's configuration holds the class `Parts` and is sent to every process, pickled: unpickling it
imports this module first. So nothing depends on how dart was installed, and vLLM in processes that
dart did not start is unchanged.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partial

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner

from dart_cli.engines.vllm import images, transfer
from dart_cli.engines.vllm.models import register_models
from dart_cli.engines.vllm.sampler import Draws, ExactSampler
from dart_cli.runtime.liveness import when_orphaned


class Parts(Draws):
    """Draws; vLLM imports this module by its name."""


def _install() -> None:
    WeightTransferEngineFactory.register_engine(transfer.BACKEND, transfer.FileWeights)
    register_models()
    images.replace_processors()
    images.scale_pixels()
    gpu_model_runner.Sampler = ExactSampler  # vLLM has no setting for it
    if current_platform.is_cpu():
        _pad_heads()
    # By name: a process that is still reading its configuration has no parent_process() yet.
    if multiprocessing.current_process().name != "MainProcess":
        # vLLM's processes would outlive a rollout worker that is killed, and keep its GPU.
        when_orphaned(os.getppid(), partial(os._exit, 1))


def _pad_heads() -> None:
    """Attention of the supported text models, over heads of any size."""
    from vllm.model_executor.models import qwen2, qwen3

    from dart_cli.engines.vllm.heads import PaddedAttention

    for module in (qwen2, qwen3):
        module.Attention = PaddedAttention


_install()
