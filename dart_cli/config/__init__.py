"""The configuration of a run, and all that is read out of it before anything starts.

schema        the sections and keys, their types, ranges and texts
load          reading a TOML file and `--set` overrides; errors with suggestions
rules         what no single key shows: combinations, places, tasks, model, devices
devices       which GPUs each process uses
models        the folders of models, shipped or the user's own
model_files, model_tensors, architecture    what such a folder must hold: small files, headers, shapes
pointer_head  the tokens and tensors of a folder that can point
adapters      the layers that `model.lora` adapts, and what that needs
rate          the learning rate that follows from the model, where a file sets none
engines       whether the engine can be used: a user's own, the installed vLLM
screens       how large a run's screens are, and the caches of engines that follow from it
task_split    which tasks are trained on, which are held out
endpoints     the addresses, keys and folders of the run's processes
families, family_values    families of models: recognised by a folder; their values of [policy]
dry_run       what a run would do: `--dry-run`
template      the starter file and docs/config.md, from the texts of the keys
"""
