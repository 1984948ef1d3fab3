"""Our extensions of vLLM, installed in each of its processes when this module is imported.

    Parts         what vLLM's configuration holds, so that every process imports this module
    FileWeights   the back end `file` of vLLM's native weight transfer
    CountedBatch  vLLM's batch, which does not wait for the token ids of the step before
    keep_alone    features of a screen in a tensor of their own
    loaded_files  the files of a model folder that every loader of dart reads

vLLM's configuration is sent to every process, pickled: unpickling it imports this module first. So nothing
depends on how dart was installed, and vLLM in processes that dart did not start is unchanged.

Of a weight transfer vLLM's four phases run in every worker process: the tensors are streamed from the safetensors
files one by one into the model, re-packed and sharded as at the first load. Nothing is checked here:
the rollout worker has checked the set before (dart_cli.weights.file). An error here leaves a model
with tensors of two versions, which must not serve again.

A head that is tied to the embeddings is in no file: on a CPU it holds a packed copy of them, which
vLLM's reload does not update. So it is tied and packed again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import default_loader
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dart_cli.config.model_folder import weight_files
from dart_cli.engines.vllm import models
from dart_cli.engines.vllm.sampler import Draws, ExactSampler
from dart_cli.policy.lora import with_adapters
from dart_cli.runtime.liveness import when_orphaned

# It warns at every update of all tensors that are in no file: rotary tables and tied heads.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

BACKEND = "file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Empty: this back end needs no initialisation."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One weight set."""

    files: list[str]  # safetensors, checked
    base: list[str] = field(default_factory=list)  # where `files` are adapters: what they adapt
    factor: float = 1.0  # of what they add


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):
    """Reads checked safetensors files."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied = list(tied_heads(model))

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to initialise."""

    def start_weight_update(self) -> None:
        """Prepare each layer to be loaded again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the tensors; this worker keeps its shard of each."""
        tensors = _tensors(update_info.files, self.device)
        if update_info.base:
            base = _tensors(update_info.base, self.device)
            tensors = with_adapters(
                base, dict(tensors), update_info.factor, self.model_config.dtype
            )
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Re-pack the remaining layers and tie the heads again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for head, embedding in self._tied:
            head.tie_weights(embedding)
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Nothing to release."""


def tied_heads(
    model: torch.nn.Module,
) -> Iterator[tuple[ParallelLMHead, VocabParallelEmbedding]]:
    """Pairs of a head and the embedding that it shares its tensor with."""
    embeddings = {
        module.weight.data_ptr(): module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
            yield module, embeddings[module.weight.data_ptr()]


def _tensors(files: Iterable[str], device: torch.device) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping, it has keys() alone
                yield name, opened.get_tensor(name)


class Parts(Draws):
    """Draws; vLLM imports this module by its name."""


class CountedBatch(InputBatch):
    """vLLM's batch, whose lists of output tokens keep their placeholders, as without a logits processor.

    With one vLLM would wait, in each step, until the ids of the step before are on the host; Draws reads the
    lengths of the lists alone. Penalties and banned words, which read ids, still get them.
    """

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options | {"logitsprocs_need_output_token_ids": False})


_keep = GPUModelRunner._cache_encoder_output  # noqa: SLF001 - it has no public name


def keep_alone(runner: GPUModelRunner, mm_hash: str, output: torch.Tensor, *rest: Any) -> None:
    """Keep the features of one screen in a tensor of their own.

    vLLM keeps a part of the tensor of all screens that were encoded together, which stays as long as any of its
    parts does: then features take more memory than the encoder cache counts.
    """
    if output.untyped_storage().nbytes() > output.nbytes:
        output = output.clone()
    _keep(runner, mm_hash, output, *rest)


def loaded_files(files: list[str], folder: str, _index: str) -> list[str]:
    """Return those of a model folder's files that `weight_files` names.

    vLLM's own function prefers the index where a folder has a single file, too, and takes every file where
    there is no index. transformers, and so the trainer, loads others.
    """
    names = {file.name for file in weight_files(Path(folder))}
    return [file for file in files if Path(file).name in names]


def _install() -> None:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
    models.register_models()
    models.replace_processors()
    models.scale_pixels()
    # vLLM has no settings for these.
    gpu_model_runner.Sampler = ExactSampler
    gpu_model_runner.InputBatch = CountedBatch
    GPUModelRunner._cache_encoder_output = keep_alone  # noqa: SLF001
    default_loader.filter_duplicate_safetensors_files = loaded_files
    if current_platform.is_cpu():
        _pad_heads()
    # By name: a process that is still reading its configuration has no parent_process() yet.
    if multiprocessing.current_process().name != "MainProcess":
        # vLLM's processes would outlive a rollout worker that is killed, and keep its GPU.
        when_orphaned(os.getppid(), partial(os._exit, 1))


def _pad_heads() -> None:
    """Attention of the supported text models, over heads of any size."""
    from vllm.model_executor.models import qwen2, qwen3

    for module in (qwen2, qwen3):
        module.Attention = models.PaddedAttention


_install()
