"""Our extensions of vLLM. Importing this module installs them in a process of vLLM.

    Parts         a class in vLLM's configuration, because of which every process imports this module
    FileWeights   the back end `file` of vLLM's weight transfer
    CountedBatch  vLLM's batch, without waiting for the token ids of the previous step
    keep_alone    keeps the features of a screen in a separate tensor
    loaded_files  returns the files of a model folder that all loaders of dart read

vLLM pickles its configuration and sends it to every process, and unpickling it imports this module. So it
does not matter how dart was installed, and vLLM in processes that dart did not start is unchanged.

The four phases of a weight transfer run in every worker process of vLLM. The tensors are streamed one by one
from the safetensors files into the model, and are packed and sharded as in the first load. Nothing is checked
here, because the rollout worker has checked the set before (dart_cli.weights.file). An error here leaves a
model with tensors of two versions, which must not serve again.

An output head that is tied to the embeddings is in no file. On a CPU it holds a packed copy of them, which
vLLM's reload does not update; it is therefore tied and packed again.
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
from dart_cli.engines.vllm.recurrence import install_recurrence
from dart_cli.engines.vllm.sampler import Draws, ExactSampler
from dart_cli.policy.lora import with_adapters
from dart_cli.runtime.liveness import when_orphaned

# At every update this logger would warn of all tensors that are in no file: rotary tables and tied heads.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

BACKEND = "file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """The arguments for initialising the back end, which needs none."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The files of one weight set."""

    files: list[str]  # safetensors, checked
    base: list[str] = field(default_factory=list)  # if `files` are adapters: the base model's files
    factor: float = 1.0  # of the adapters


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):
    """A back end of vLLM's weight transfer that reads checked safetensors files."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied = list(tied_heads(model))

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing; there is nothing to initialise."""

    def start_weight_update(self) -> None:
        """Prepare all layers to be loaded again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load this worker's shard of all tensors."""
        tensors = _tensors(update_info.files, self.device)
        if update_info.base:
            base = _tensors(update_info.base, self.device)
            tensors = with_adapters(
                base, dict(tensors), update_info.factor, self.model_config.dtype
            )
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Pack the remaining layers, and tie the heads again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for head, embedding in self._tied:
            head.tie_weights(embedding)
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Do nothing; there is nothing to release."""


def tied_heads(
    model: torch.nn.Module,
) -> Iterator[tuple[ParallelLMHead, VocabParallelEmbedding]]:
    """Yield each output head that shares its tensor with an embedding, and the embedding."""
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
            for name in opened.keys():  # noqa: SIM118 - not a mapping, it only has keys()
                yield name, opened.get_tensor(name)


class Parts(Draws):
    """Draws, under a name with which vLLM imports this module."""


class CountedBatch(InputBatch):
    """vLLM's batch, whose lists of output tokens keep placeholders although there is a logits processor.

    Because of the processor vLLM would wait in each step until the ids of the previous step are on the host.
    Draws needs only the lengths of the lists. Penalties and banned words, which read ids, still get them.
    """

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options | {"logitsprocs_need_output_token_ids": False})


_keep = GPUModelRunner._cache_encoder_output  # noqa: SLF001 - it has no public name


def keep_alone(runner: GPUModelRunner, mm_hash: str, output: torch.Tensor, *rest: Any) -> None:
    """Keep the features of one screen in a separate tensor.

    vLLM keeps a part of the tensor of all screens that were encoded together. The whole tensor then stays as
    long as any of its parts, and features take more memory than the encoder cache counts.
    """
    if output.untyped_storage().nbytes() > output.nbytes:
        output = output.clone()
    _keep(runner, mm_hash, output, *rest)


def loaded_files(files: list[str], folder: str, _index: str) -> list[str]:
    """Return the files of a model folder that `weight_files` names, in place of vLLM's own function.

    vLLM's function prefers the index even if there is a single file beside it, and takes every file if there
    is no index. transformers, and so the trainer, loads other files in these cases.
    """
    names = {file.name for file in weight_files(Path(folder))}
    return [file for file in files if Path(file).name in names]


def _install() -> None:
    """Register our classes with vLLM, and replace the parts of vLLM that have no setting."""
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
    models.register_models()
    models.replace_processors()
    models.scale_pixels()
    # vLLM has no settings with which these could be replaced.
    gpu_model_runner.Sampler = ExactSampler
    gpu_model_runner.InputBatch = CountedBatch
    GPUModelRunner._cache_encoder_output = keep_alone  # noqa: SLF001
    default_loader.filter_duplicate_safetensors_files = loaded_files
    if current_platform.is_cpu():
        _pad_heads()
        install_recurrence()
    # The name is compared, because a process that still reads its configuration has no parent_process() yet.
    if multiprocessing.current_process().name != "MainProcess":
        # Without this, vLLM's processes would outlive a killed rollout worker and keep its GPU.
        when_orphaned(os.getppid(), partial(os._exit, 1))


def _pad_heads() -> None:
    """Let the supported text models attend over heads of any size."""
    from vllm.model_executor.models import qwen2, qwen3, qwen3_next

    for module in (qwen2, qwen3, qwen3_next):
        module.Attention = models.PaddedAttention


_install()
