"""The configuration of a run, and all that is read out of it before anything starts.

schema        the sections and keys, their types, ranges and texts
load          reading a TOML file and `--set` overrides; errors with suggestions
values        values as text: of the command line, of TOML, of a message
unknown_keys  what errors say of a key that is none; the words of other tools (other_tools.toml)
readers       which process reads which key, and what two processes have different
rules         what no single key shows: combinations, places, tasks, model, devices
devices       which GPUs each process uses, and which engines can be had here
model_folder  the folders of models, shipped or the user's own, and their small files
architecture  the sizes of a model and of its pointer head, as its config.json has them
adapters      what `model.lora` needs
families      families of models (families.toml): recognised by a folder; their values of [policy]
published     the shape of a checkpoint of each class, for a model whose folder is not here
learning_rate          the learning rate that follows from the model, where a file sets none
screens       how large a run's screens are, and the caches of engines that follow from it
task_split    which tasks are trained on, which are held out
endpoints     the addresses, keys and folders of the run's processes
dry_run       what a run would do: `--dry-run`
template      the starter file and docs/config.md, from the texts of the keys
"""
