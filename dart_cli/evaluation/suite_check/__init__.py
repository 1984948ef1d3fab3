"""`dart env check`: probe agents over a suite, and what its evaluators let through.

agents.py   who plays: nothing, done, fail, random, oracle
play.py     the episodes of one task, timed, each with a deadline on every call
judge.py    what the episodes of one task show (pure)
report.py   the verb: plays all tasks, prints a table or JSON
"""
