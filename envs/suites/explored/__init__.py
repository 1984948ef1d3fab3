"""Suite `explored:FOLDER`: tasks that `dart explore tasks` made from an exploration.

env     the suite, and its environment: it plays in the explored suite's, with a screen as the goal
tasks   the file FOLDER/tasks.json
"""
