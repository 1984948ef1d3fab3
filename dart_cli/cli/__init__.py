"""The verbs of `dart`: what a person types, and the part of dart_cli that each verb starts.

main          `dart` itself; rollout, train, up, status
env           the process `dart env`, and its tools check and play
data          the process `dart data`, and its tools ls, show, stats, why, draw, collect, ...
evaluate      `dart eval`: held-out tasks, grounding sets
serve         the process `dart serve`
explore       `dart explore`: the screens of an application
model         `dart model`: folders of models, and rows for a verifier
tune          `dart tune`: supervised training of a folder
tools         view, export, doctor, init, keys
up            the whole run from one command
live_display  what `dart up` shows meanwhile
options       arguments and options that verbs share
reference     docs/cli.md and docs/config.md, from the same texts as `--help`
"""
