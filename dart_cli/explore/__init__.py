"""`dart explore`: the screens of an application that no model was trained on, and the steps between them.

exploration        the command: checks its options, explores, and prints a summary
explorer           the slots, which share one memory and one graph
choosing           the choice of the next action, and the words of elements that are left alone
graph              the folder of screens, edges, merges and starts, written after each step
graph_statistics   the numbers of an exploration
paths              the steps of a graph by what was tried, and the shortest paths through it
phrasing           phrases for elements, outcomes and screens, from the names that an environment reports
rows               grounding rows from a graph
tasks              tasks from a graph: paths that can be replayed, for the suite `explored`
options            the options of the three commands

`dart view` reads a graph with `graph`, `paths` and `phrasing` alone (a contract in pyproject.toml), so that
it works without the explorer. The suite `explored` (envs/suites/explored) imports nothing from here.
"""
