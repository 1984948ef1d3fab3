"""Inference engines: prompts in, exact samples out.

base                 the interfaces Engine, PromptEncoder, Responder, and the types they exchange
completions          a completion under construction, and its conversion to messages
responder            answers an ActRequest: renders the prompt, asks the engine, decodes the text
request_validator    checks a request before it waits
load_meter           seconds by phase and how full the batch is, for the heartbeat

transformers_engine  the engine over transformers; its parts:
batch                the running batch, and when requests join it
kv_cache             keys and values of the batch's rows
prefix_cache         keys and values of prompts served before
prefix_window        what of these caches a change of weights leaves in place
features             cache of the vision tower's output
sampling             logits -> tokens with their log-probabilities and entropies
inverse_cdf          the draw itself, which vLLM's worker uses too
pointing             the tokens that a pointer forces, and the patch that is drawn with the last of them
verified             a verifier chooses where a greedy pointer clicks

vllm/                the engine over vLLM
scripted             an engine that calls a function, for tests
"""
