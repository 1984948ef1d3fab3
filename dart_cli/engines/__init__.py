"""Inference engines: they take prompts and return samples with exact log-probabilities.

base                 the interfaces Engine, PromptEncoder and Responder, and the types that they exchange
completions          a completion under construction, and its conversion to messages
responder            answers an ActRequest: renders the prompt, calls the engine, decodes the text
verified_responder   the same, with greedy clicks moved to a place that a verifier accepts
requests             checks a request before it waits, and decides when it joins a batch
sampling             draws tokens with their log-probabilities and entropies from logits, for all engines

transformers_engine  the engine over transformers, with these parts:
batch                the running batch
caches               keys and values of the batch and of earlier prompts, features of screens
states               states of recurrent layers: of the batch, and snapshots of earlier prompts
pointer_sampling     the tokens that a pointer forces, and the patch that is drawn with the last of them

vllm/                the engine over vLLM
scripted             an engine that calls a function, to try the processes of a run
"""
