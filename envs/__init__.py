"""Environments: real GUIs behind one contract.

contract/   what an environment, a task and an action are; suites by name
tools/      what several suites are built with: input events, child programs, task files
suites/     the suites that ship with dart
"""
