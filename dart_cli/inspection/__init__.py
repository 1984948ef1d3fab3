"""Reading a run, also while it is live: a reader disturbs no process.

find           which run is meant, and which of its trajectories
trajectories   a trajectory with its steps and their use in batches, read once
explain        what happened to it, and why
counts         how much there is of everything, and how the tasks fare
curves         success over versions: points of enough episodes, their intervals, the mean over tasks
axes           what curves are drawn over: versions, trajectories, or minutes of training
comparison     what tells runs apart: settings that differ, and notes
terminal       these on a terminal: `dart data ls`, `show`, `why`, `stats`; dart_cli/view has them as pages
pictures       a run by Matplotlib: `dart data draw`, the report's curve
report         the end of `dart up`: success before and after, whether it learned, films
"""
