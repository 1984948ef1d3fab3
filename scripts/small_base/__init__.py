"""Sources, questions and training of builtin:small (scripts/build_small_base.py)."""
