"""What an environment is, for whoever writes one and for whatever plays one.

base          tasks, observations, verdicts, GuiEnv
actions       typed GUI actions, in pixels of the screenshot; their table for the documentation
methods       what methods must take and return, as errors say it
registry      suites by name, and the environments that play them; tasks by pattern
options       options of suites, checked by their types; guests and devices shared out to slots
screenshots   image encodings, screenshots as observations, and the texts beside them
elements      what an explorer needs: elements on a screen, which screens are one; cells where there is no tree
queueing      waits for what environments share, in which the deadline of a call stands still
own_code      suites and action parsers of a user's own, by name
textfiles     text files as other programs write them: encodings, line ends
"""
