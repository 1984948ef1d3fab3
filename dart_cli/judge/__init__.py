"""A second model's opinion of an episode: whether its task was done, from the actions and the screens.

judge         asks a model about an episode, within deadlines and a bounded number at once; returns a
              Judgement
evidence      the prompt: the task, the actions as text, some of the screens; and a strict reader of the
              answers
folder_judge  asks a model folder through the transformers engine; imports torch when it is loaded

A model behind a server is asked through dart_cli/chat.

`dart env` uses it while a run plays (`[env.judge]`), `dart eval` in an evaluation, `dart data judge`
afterwards.
"""
