"""`dart env play`: one task by hand, by its solution, or by random clicks, and a film of it.

commands   the typed commands: text -> action, action -> text
session    the episode, the terminal, the film
"""
