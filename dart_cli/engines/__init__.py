"""Inference engines: prompts in, exact samples out."""
