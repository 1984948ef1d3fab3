"""The read model of a run: it can be read at any time, because a reader disturbs no process.

run_lookup           finds the run that a command means, and the trajectory with a given id
trajectories         a trajectory with its steps and their use in batches
trajectory_history   what happened to a trajectory, in order, with reasons
run_counts           how much a run holds of everything, and the results of its tasks
curves               success over policy versions: points with intervals, and the mean over tasks
axes                 the x axes of curves: versions, trajectories, or minutes of training
comparison           the settings in which runs differ, and a person's notes on them
terminal             prints all this on a terminal: `dart data ls`, `show`, `why`, `stats`
pictures             a run drawn by Matplotlib: `dart data draw`, and the report's curve
film_pictures        films of episodes as picture files
learning             whether a run learned
final_report         the end of `dart up`: success before and after, whether the run learned, films
"""
