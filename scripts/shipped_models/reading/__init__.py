"""Sources, questions and training of builtin:small (scripts/shipped_models/build_small.py)."""
