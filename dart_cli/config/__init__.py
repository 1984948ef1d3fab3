"""The configuration of a run, and everything that follows from it before a process starts.

schema         the sections and keys, with their types, ranges and texts
load           reads a TOML file and `--set` overrides; its errors suggest corrections
values         values as text: on the command line, in TOML, in a message
unknown_keys   the errors for unknown keys, also for the names of other tools (other_tools.toml)
readers        which process reads which key, and which keys differ between two processes
rules          checks of what no single key shows: combinations, places, tasks, model, devices
devices        which GPUs each process uses, and which engines can be used here
model_folder   folders of models, shipped or the user's own, and their small files
architecture   the sizes of a model and of its pointer head, read from its config.json
adapters       checks of what `model.lora` needs
families       families of models (families.toml): how they are recognised, and what they set in [policy]
published      the shape of a published checkpoint of each class, for a model whose folder is not here
learning_rate  the learning rate that follows from the model, where a file sets none
teacher        the teacher as a configuration of its own
screens        the size of a run's screens, and the sizes of the engines' caches that follow from it
task_split     which tasks are trained on, and which are held out
endpoints      the addresses, keys and folders of the run's processes
dry_run        what a run would do: `--dry-run`
template       the starter file and docs/config.md, from the texts of the keys
"""
