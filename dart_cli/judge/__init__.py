"""A second model's opinion of an episode: whether its task was done, from the actions and the screens.

chat       a server that speaks the OpenAI chat API
judge      asks a server or a model, within deadlines, a bounded number at once; the opinion as a Judgement
evidence   what the judge is shown: the task, the actions as text, some of the screens; its answers, read strictly
folder_judge      a judge from a model folder, through the transformers engine; imports torch when it is loaded

Used by `dart env` while a run plays (`[env.judge]`), by `dart eval`, and by `dart data judge` afterwards.
"""
