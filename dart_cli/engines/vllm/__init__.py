"""The engine over vLLM's AsyncLLM (docs/engines.md).

engine     VllmEngine: requests in, exact samples out, weights taken in flight
start      parts, platform and arguments of vLLM; errors before the first request
set_files  the files of a weight set, held open while it is taken
slots      slots of vLLM's batch, and the queue for them
prompts    a request in vLLM's types, and its outputs in ours
adapters   versions of adapters that are served beside the weights
plugin     what every process of vLLM loads before the model: the modules below
models     the model classes that can be served
sampler    samples tokens by the request's own seed, with exact log-probabilities and entropies
images     sizes of screens, so that vLLM needs no image processor of its own
transfer   the weight transfer back end `file`
heads      attention heads of sizes that vLLM's CPU kernels lack

The last six also run in vLLM's processes, the others in the rollout worker alone. They replace and read parts
that vLLM does not document, so one minor version is pinned (dart_cli/config/devices.py).
"""

SECTION = "dart"
"""Key of our values in vLLM's `additional_config`, `mm_processor_kwargs` and `extra_args`."""
