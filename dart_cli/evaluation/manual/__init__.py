"""`dart env play`: one task by hand, by its solution, or by random clicks, and a film of it.

words.py     the typed language: text -> action, action -> text
session.py   the episode, what is said on the terminal, the film
"""
