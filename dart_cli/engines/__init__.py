"""Inference engines: prompts in, exact samples out.

base                 the interfaces Engine, PromptEncoder, Responder, the types they exchange, the load meter
completions          a completion under construction, and its conversion to messages
responder            answers an ActRequest: renders the prompt, asks the engine, decodes the text; the verifier
requests             checks a request before it waits, and when it joins a batch
sampling             logits -> tokens with their log-probabilities and entropies; vLLM's worker draws so, too

transformers_engine  the engine over transformers; its parts:
batch                the running batch
caches               keys and values of the batch and of earlier prompts, features of screens
pointing             the tokens that a pointer forces, and the patch that is drawn with the last of them

vllm/                the engine over vLLM
scripted             an engine that calls a function, to try the processes of a run
"""
