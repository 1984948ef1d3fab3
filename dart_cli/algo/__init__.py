"""The mathematics of the run, pure and named by axis.

advantage  rewards of a group -> advantages       schedule  success rates -> what to play next
loss       the trainer's objective (the only part that knows torch)
"""
