"""The parts of vLLM that dart replaces, reads or implements, and whether an installed vLLM has them.

    REPLACED, READ, IMPLEMENTED   each part: where dart touches it, what it needs there, and the test that
                                  notices a change
    missing_parts                 the parts that a vLLM does not have as dart needs them, and what differs
    TESTED                        the versions that the engine tests have passed on

The checks read vLLM's source and import nothing, so every process can run them: no torch, no vLLM. They see
names, parameters and fields; what a part does is seen by its test, which runs a real engine. Any vLLM with
all the parts is accepted. `python -m dart_cli.config.vllm_parts FOLDER...` checks unpacked wheels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dart_cli.config.source_checks import (
    Called,
    Has,
    Implemented,
    Module,
    Named,
    Need,
    Overridden,
    Used,
    read_module,
)

TESTED = ("0.32.0",)
"""Versions that the engine tests passed on; docs/engines.md has the table."""


@dataclass(frozen=True)
class Part:
    """One part of vLLM that dart depends on beyond what its documentation promises, or implements."""

    name: str
    why: str
    ours: str  # the module of dart_cli/engines/vllm that touches it
    test: str  # of tests/engines: it fails if the part behaves differently
    needs: tuple[Need, ...]


# --- the parts ----------------------------------------------------------------------------------

_RUNNER = "v1/worker/gpu_model_runner.py"
_SAMPLER = "v1/sample/sampler.py"
_INTERFACE = "v1/sample/logits_processor/interface.py"
_ENGINE = "v1/engine/async_llm.py"
_TRANSFER = "distributed/weight_transfer/base.py"
_RELOAD = "model_executor/model_loader/reload/layerwise.py"
_RELOADS = "model_executor/model_loader/reload/__init__.py"
_VOCABULARY = "model_executor/layers/vocab_parallel_embedding.py"
_MODELS = "model_executor/models"
_VISION = tuple(f"{_MODELS}/{name}.py" for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
_PROCESSING = "multimodal/processing"

REPLACED = (
    Part(
        "sampler",
        "vLLM has no setting for another sampler, and its own cannot continue in a completion",
        "plugin.py, sampler.py",
        "test_vllm_engine.py::test_the_same_seed_draws_the_same_tokens_as_the_transformers_engine",
        (
            Used(_RUNNER, "Sampler"),
            Overridden(
                _SAMPLER,
                "Sampler.forward",
                ("logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"),
            ),
            Has("v1/sample/metadata.py", "SamplingMetadata", ("temperature", "logitsprocs")),
            Has("v1/sample/logits_processor/state.py", "LogitsProcessors", ("all",)),
            Has("v1/outputs.py", "SamplerOutput", ("sampled_token_ids", "logprobs_tensors")),
            Has(
                "v1/outputs.py",
                "LogprobsTensors",
                ("logprob_token_ids", "logprobs", "selected_token_ranks"),
            ),
        ),
    ),
    Part(
        "model runner",
        "the newer runner has a sampler of its own, so VLLM_USE_V2_MODEL_RUNNER = 0 asks for the older",
        "start.py",
        "test_vllm_engine.py::test_numbers_match_a_fresh_forward_over_turns_and_images",
        (
            Has(_RUNNER, "GPUModelRunner", ("sampler", "input_batch")),
            Used("envs.py", "environment_variables"),
        ),
    ),
    Part(
        "pixel scaling",
        "vLLM's own scaling on the device differs from the image processor in the last bit",
        "images.py: PixelScaling",
        "test_vllm_families.py::test_engine_and_trainer_agree",
        (
            *(Used(file, "build_mm_input_norm") for file in _VISION),
            Overridden(
                "model_executor/layers/fusion/mm_input_norm.py",
                "build_mm_input_norm",
                ("model_config",),
            ),
            Called("config/vllm.py", "get_current_vllm_config"),
            Has("engine/arg_utils.py", "EngineArgs", ("mm_device_do_normalize",)),
        ),
    ),
    Part(
        "names of tensors",
        "its loader refuses tensors that its classes do not have, and a pointer head's are such",
        "models.py: register_models",
        "test_vllm_families.py::test_engine_and_trainer_agree",
        (
            Called(f"{_MODELS}/utils.py", "WeightsMapper.__or__", positional=1),
            *(
                Has(f"{_MODELS}/{module}.py", name, ("hf_to_vllm_mapper",))
                for module, name in (
                    ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
                    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
                    ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
                )
            ),
        ),
    ),
    Part(
        "attention on a CPU",
        "its kernels lack the head sizes of small models",
        "heads.py",
        "test_vllm_engine.py::test_numbers_match_a_fresh_forward_over_turns_and_images",
        (
            *(Used(f"{_MODELS}/{name}.py", "Attention") for name in ("qwen2", "qwen3")),
            Called(
                "model_executor/layers/attention/attention.py",
                "Attention.__init__",
                positional=3,
            ),
            Called(
                "model_executor/layers/attention/attention.py", "Attention.forward", positional=3
            ),
            Called(
                "v1/attention/backends/cpu_attn.py", "CPUAttentionBackend.get_supported_head_sizes"
            ),
        ),
    ),
    Part(
        "image processor",
        "screens come prepared, so only the sizes of the largest are asked for",
        "images.py: PreparedImages",
        "test_vllm_engine.py::test_numbers_match_a_fresh_forward_over_turns_and_images",
        (
            Overridden(
                f"{_PROCESSING}/processor.py",
                "BaseMultiModalProcessor.get_dummy_mm_inputs",
                ("mm_counts", "*", "cache", "scheduler_config"),
            ),
            Implemented(
                f"{_PROCESSING}/processor.py",
                "BaseMultiModalProcessor",
                ("_get_mm_fields_config", "_get_prompt_updates"),
            ),
            Overridden(
                f"{_PROCESSING}/context.py", "BaseProcessingInfo.get_supported_mm_limits", ()
            ),
            Overridden(
                f"{_PROCESSING}/context.py",
                "BaseProcessingInfo.get_mm_max_tokens_per_item",
                ("seq_len", "mm_counts"),
            ),
            Implemented(
                f"{_PROCESSING}/dummy_inputs.py",
                "BaseDummyInputsBuilder",
                ("get_dummy_text", "get_dummy_mm_data"),
            ),
            Named("multimodal/__init__.py", "MULTIMODAL_REGISTRY"),
            Called(
                "multimodal/registry.py",
                "MultiModalRegistry.register_processor",
                positional=1,
                keywords=("info", "dummy_inputs"),
            ),
        ),
    ),
)
"""Parts of vLLM that ours take the place of."""

READ = (
    Part(
        "image cache",
        "a screen that vLLM's process has is sent by its hash alone",
        "prompts.py: sent_items",
        "test_vllm_engine.py::test_an_image_is_sent_once",
        (
            Called("v1/engine/input_processor.py", "InputProcessor.inject_into_mm_cache", 2),
            Has("v1/engine/input_processor.py", "InputProcessor", ("renderer",)),
            Has("renderers/base.py", "BaseRenderer", ("mm_processor_cache",)),
            Called("multimodal/cache/base.py", "BaseMultiModalProcessorCache.is_cached_item", 1),
        ),
    ),
    Part(
        "places under asynchronous scheduling",
        "a request's list of tokens grows by a placeholder for each token that the host has not read yet",
        "sampler.py: Draws",
        "test_vllm_async.py::test_tokens_are_those_of_their_places_in_a_batch_that_joins_leaves_and_preempts",
        (
            Has(_RUNNER, "GPUModelRunner", ("use_async_scheduling",)),
            Called("v1/worker/gpu_input_batch.py", "InputBatch.update_async_output_token_ids"),
        ),
    ),
    Part(
        "end of the engine",
        "requests in flight get an error with a cause, and no socket, context or thread is left",
        "engine.py: close",
        "test_vllm_engine.py::test_an_engine_that_dies_is_an_error_and_does_not_hang",
        (
            Called("v1/engine/output_processor.py", "OutputProcessor.propagate_error", 1),
            Has(_ENGINE, "AsyncLLM", ("output_processor", "output_handler", "engine_core")),
            Has("v1/engine/core_client.py", "MPClient", ("resources",)),
            Has(
                "v1/engine/core_client.py",
                "BackgroundResources",
                ("ctx", "output_socket", "input_socket", "engine_manager"),
            ),
        ),
    ),
    Part(
        "layerwise reload",
        "tensors are loaded, sharded and packed again as at the first load",
        "transfer.py",
        "test_vllm_engine.py::test_new_weights_are_those_that_serve_and_their_old_image_features_are_"
        "forgotten",
        (
            Called(_RELOAD, "initialize_layerwise_reload", 1),
            Called(_RELOAD, "finalize_layerwise_reload", 2),
            Named(_RELOADS, "initialize_layerwise_reload"),
            Named(_RELOADS, "finalize_layerwise_reload"),
        ),
    ),
    Part(
        "tied heads",
        "a head that shares its tensor with the embeddings is in no file and is packed again",
        "transfer.py: tied_heads",
        "test_vllm_engine.py::test_weights_taken_in_flight_leave_every_token_the_numbers_of_its_version",
        (
            Has(_VOCABULARY, "VocabParallelEmbedding", ("quant_method",)),
            Called(_VOCABULARY, "ParallelLMHead.tie_weights", 1),
            Called(
                _VOCABULARY,
                "UnquantizedEmbeddingMethod.process_weights_after_loading",
                1,
            ),
        ),
    ),
    Part(
        "registry of models",
        "a class that is registered again takes the place of vLLM's entry",
        "models.py, images.py",
        "test_vllm_families.py::test_engine_and_trainer_agree",
        (
            Named(f"{_MODELS}/registry.py", "ModelRegistry"),
            Called(f"{_MODELS}/registry.py", "_ModelRegistry.register_model", 2),
            *(
                Has(file, name)
                for file, name in zip(
                    _VISION,
                    (
                        "Qwen2VLForConditionalGeneration",
                        "Qwen2_5_VLForConditionalGeneration",
                        "Qwen3VLForConditionalGeneration",
                    ),
                    strict=True,
                )
            ),
        ),
    ),
)
"""Parts of vLLM that ours read or call, and that it does not document."""

IMPLEMENTED = (
    Part(
        "logits processor",
        "vLLM tells it which request is in which row",
        "sampler.py: Draws",
        "test_vllm_engine.py::test_a_partial_goes_on_token_for_token_from_any_place",
        (
            Implemented(
                _INTERFACE,
                "LogitsProcessor",
                ("__init__", "apply", "is_argmax_invariant", "update_state"),
            ),
            Overridden(
                _INTERFACE,
                "LogitsProcessor.__init__",
                ("vllm_config", "device", "is_pin_memory"),
            ),
            Has(_INTERFACE, "BatchUpdate", ("removed", "added", "moved")),
            Has(_INTERFACE, "MoveDirectionality", ("SWAP",)),
        ),
    ),
    Part(
        "weight transfer",
        "the back end `file` streams a checked set into the model",
        "transfer.py: FileWeights",
        "test_vllm_engine.py::test_weights_taken_in_flight_leave_every_token_the_numbers_of_its_version",
        (
            Implemented(
                _TRANSFER,
                "WeightTransferEngine",
                (
                    *("init_transfer_engine", "start_weight_update", "finish_weight_update"),
                    *("receive_weights", "shutdown"),
                ),
            ),
            Overridden(
                _TRANSFER,
                "WeightTransferEngine.__init__",
                ("config", "vllm_config", "device", "model"),
            ),
            Has(_TRANSFER, "WeightTransferInitInfo"),
            Has(_TRANSFER, "WeightTransferUpdateInfo"),
            Has(_TRANSFER, "WeightTransferUpdateRequest", ("update_info",)),
            Called(
                "distributed/weight_transfer/factory.py",
                "WeightTransferEngineFactory.register_engine",
                2,
            ),
        ),
    ),
    Part(
        "engine",
        "requests, pauses, weight updates and adapters",
        "engine.py, adapters.py",
        "test_vllm_engine.py::test_weights_taken_in_flight_leave_every_token_the_numbers_of_its_version",
        (
            Called(_ENGINE, "AsyncLLM.from_engine_args", 1),
            Called(_ENGINE, "AsyncLLM.generate", 3, ("lora_request",)),
            Called(_ENGINE, "AsyncLLM.abort", 1),
            Called(_ENGINE, "AsyncLLM.pause_generation", 0, ("mode", "clear_cache")),
            Called(_ENGINE, "AsyncLLM.resume_generation"),
            Called(_ENGINE, "AsyncLLM.start_weight_update"),
            Called(_ENGINE, "AsyncLLM.update_weights", 1),
            Called(_ENGINE, "AsyncLLM.finish_weight_update", 0, ("weight_version",)),
            Called(_ENGINE, "AsyncLLM.update_weight_version", 1),
            Called(_ENGINE, "AsyncLLM.reset_encoder_cache"),
            Called(_ENGINE, "AsyncLLM.add_lora", 1),
            Called(_ENGINE, "AsyncLLM.remove_lora", 1),
            Called(_ENGINE, "AsyncLLM.shutdown", 1),
            Has(_ENGINE, "AsyncLLM", ("errored", "input_processor")),
            Has("lora/request.py", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
            Has("outputs.py", "RequestOutput", ("num_cached_tokens",)),
            Has(
                "outputs.py",
                "CompletionOutput",
                ("token_ids", "logprobs", "finish_reason", "weight_versions"),
            ),
            Has("logprobs.py", "FlatLogprobs", ("logprobs",)),
            Has(
                "sampling_params.py",
                "SamplingParams",
                (
                    *("temperature", "max_tokens", "logprobs", "flat_logprobs", "stop_token_ids"),
                    *("ignore_eos", "detokenize", "output_kind", "extra_args"),
                ),
            ),
            Has("sampling_params.py", "RequestOutputKind", ("DELTA",)),
        ),
    ),
    Part(
        "prompts with screens",
        "a prompt carries its screens, each with its hash and its placeholders",
        "prompts.py, images.py",
        "test_vllm_engine.py::test_a_screen_travels_to_vllm_as_bytes",
        (
            Called("inputs/engine.py", "tokens_input", 1, ("cache_salt",)),
            Called(
                "inputs/engine.py",
                "mm_input",
                0,
                ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders", "cache_salt"),
            ),
            Has("multimodal/inputs.py", "PlaceholderRange", ("offset", "length")),
            Has("multimodal/inputs.py", "MultiModalFieldElem", ("data", "field")),
            Has("multimodal/inputs.py", "MultiModalFlatField", ("slices",)),
            Has("multimodal/inputs.py", "MultiModalBatchedField"),
            Has("multimodal/inputs.py", "MultiModalKwargsItem"),
            Has("multimodal/inputs.py", "MultiModalKwargsItems"),
            Named("inputs/engine.py", "MultiModalInput"),
        ),
    ),
    Part(
        "engine arguments",
        "what exactness needs is set",
        "start.py: engine_args",
        "test_vllm_engine.py::test_numbers_match_a_fresh_forward_over_turns_and_images",
        (
            Has("engine/arg_utils.py", "AsyncEngineArgs"),
            Has(
                "engine/arg_utils.py",
                "EngineArgs",
                (
                    *("model", "dtype", "seed", "skip_tokenizer_init", "tensor_parallel_size"),
                    *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager"),
                    *("enable_prefix_caching", "async_scheduling", "limit_mm_per_prompt"),
                    *("mm_processor_kwargs", "logits_processors", "additional_config"),
                    *("max_logprobs", "weight_transfer_config", "disable_log_stats"),
                    *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
                    *("kv_cache_memory_bytes", "enable_chunked_prefill", "mm_processor_cache_gb"),
                    "max_num_batched_tokens",
                ),
            ),
        ),
    ),
)
"""Interfaces that vLLM documents or offers to plug-ins."""

PARTS = (*REPLACED, *READ, *IMPLEMENTED)


def missing_parts(folder: Path, parts: Sequence[Part] = PARTS) -> list[str]:
    """A line for each part that the package `vllm` in `folder` does not have as it is needed."""
    modules: dict[str, Module | None] = {}
    lines = []
    for part in parts:
        for need in part.needs:
            if need.file not in modules:
                modules[need.file] = read_module(folder / need.file)
            module = modules[need.file]
            problem = "is absent" if module is None else need.problem(module)
            if problem:
                lines.append(f"{part.name} ({need.file} {problem})")
                break
    return lines


if __name__ == "__main__":
    is_complete = True
    for argument in sys.argv[1:]:
        lines = missing_parts(Path(argument))
        is_complete = is_complete and not lines
        sys.stdout.write(f"{argument}: {len(PARTS)} parts, {len(lines)} differ\n")
        sys.stdout.writelines(f"  {line}\n" for line in lines)
    sys.exit(not is_complete)
