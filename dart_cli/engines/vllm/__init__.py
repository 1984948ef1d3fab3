"""The engine over vLLM's AsyncLLM (docs/engines.md).

engine     VllmEngine: requests in, exact samples out, weights taken in flight
start      parts, platform and arguments of vLLM; errors before the first request
room       how a GPU's memory is divided, for doctor's plan too
set_files  the files that weights and adapters are read from
prompts    a request in vLLM's types, and its outputs in ours
plugin     what every process of vLLM loads before the model: the modules below, and the weight transfer
models     the model classes that can be served, their screens, their attention on a CPU
sampler    samples tokens by the request's own seed, with exact log-probabilities and entropies

The last three also run in vLLM's processes, the others in the rollout worker alone. They replace and read parts
that vLLM does not document, so one minor version is pinned (dart_cli/config/devices.py).
"""

SECTION = "dart"
"""Key of our values in vLLM's `additional_config`, `mm_processor_kwargs` and `extra_args`."""
