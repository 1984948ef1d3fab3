"""Suite `explored:FOLDER`: tasks that `dart explore tasks` made from an exploration.

env     the suite, and its environment: the explored suite's environment with a screen as the goal
tasks   the file FOLDER/tasks.json
"""
