"""The commands of `dart`: their arguments and help texts, and the part of dart_cli that each of them starts.

main          `dart` itself, and the commands rollout, train, up and status
env           the process `dart env`, and its tools check and play
data          the process `dart data`, and its tools ls, show, stats, why, draw, collect, ...
evaluate      `dart eval`: held-out tasks, grounding sets
serve         the process `dart serve`
explore       `dart explore`: the screens of an application
model         `dart model`: folders of models, and rows for a verifier
tune          `dart tune`: supervised training of a model folder
tools         view, export, doctor, init, keys
up            runs and ends all processes of a run together: `dart up`
live_display  what `dart up` shows while it runs
options       arguments and options that several commands have
reference     writes docs/cli.md and docs/config.md from the same texts as `--help`
"""
