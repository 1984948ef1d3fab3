"""Reading a run, also while it is live: a reader disturbs no process.

find             which run is meant, and which of its trajectories
ls               `dart data ls`: trajectories of the run, members of its pool
show             `dart data show`: one trajectory with its steps
stats            `dart data stats`: how much there is of everything
explain          `dart data why`: what happened to one trajectory, and why
curation_plots   `dart data draw`: what curation decided, as pictures
curves           success over versions: points of enough episodes, their intervals, the mean over tasks
learned          whether a run learned, with the figures: the report's last line
report           the end of `dart up`, and `dart data show --film`: success before and after, the curve, films
text             how values of a run are written for a person

A function without a console returns plain JSON values; one with a console prints the same.
"""
