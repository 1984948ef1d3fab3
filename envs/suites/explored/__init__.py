"""Suite `explored:FOLDER`: tasks that `dart explore tasks` made from an exploration.

env     the suite, and its environment: that of the explored suite, with a screen to reach as the goal
tasks   the file FOLDER/tasks.json
"""
