"""Action languages, one module each; see dart_cli/policy/codec.py."""
