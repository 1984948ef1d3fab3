"""Suite `explored:FOLDER`: tasks that `dart explore tasks` made of an exploration.

env     the environment of the explored suite, with the goal "that screen is reached", and the suite
tasks   the file FOLDER/tasks.json
"""
