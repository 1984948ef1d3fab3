"""Action languages, one module each; see dart_cli/policy/codec.py.

compact   one call with integers 0-999: the tiny model's language
uitars    a thought, then one call: UI-TARS text
grammar   the LALR parser of both, with readable errors
keys      names of keys, the same in every language
"""
