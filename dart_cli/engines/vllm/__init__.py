"""The engine over vLLM's AsyncLLM (docs/engines.md).

engine     VllmEngine: requests in, exact samples out, weights taken in flight
start      version, platform and arguments of vLLM; what can go wrong before the first request
places     places in vLLM's batch, and the line before them
prompts    a request in vLLM's words, and what vLLM says of it in ours
plugin     what every process of vLLM loads before the model: the parts below, and its models
sampler    draws tokens by the request's own seed, with exact log-probabilities and entropies
images     sizes of screens, so that vLLM needs no image processor of its own
transfer   the weight transfer back end `file`
heads      attention heads of sizes that vLLM's CPU kernels lack

The last five also run in vLLM's processes, the others in the rollout worker alone.
"""
