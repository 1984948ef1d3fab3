"""The engine over vLLM's AsyncLLM (docs/engines.md).

engine       VllmEngine, which serves requests with exact samples and takes weights in flight
batch_slots  the slots of vLLM's batch, and the queue for them
start        starts vLLM: checks its build and the platform, and makes its arguments
room         plans how a GPU's memory is divided; `dart doctor` uses it too
set_files    the files that vLLM reads weights and adapters from
prompts      converts a request to vLLM's types, and vLLM's outputs to ours
plugin       our extensions of vLLM, which each of its processes imports before it loads the model
models       the model classes that can be served, their screens, and their attention on a CPU
recurrence   computes recurrent layers on a CPU
sampler      samples tokens by the seed of each request, with exact log-probabilities and entropies

The last four also run in vLLM's processes, the others in the rollout worker alone. They replace and read
parts that vLLM does not document, so one minor version is pinned (dart_cli/config/devices.py).
"""

SECTION = "dart"
"""The key of dart's values in vLLM's `additional_config`, `mm_processor_kwargs` and `extra_args`."""
