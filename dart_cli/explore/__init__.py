"""`dart explore`: the screens of an application that no model was trained on, and what leads from one to another.

options    what its commands are asked for
run        the verb: what was asked for, checked; what was found
explorer   the slots, which share one memory and one graph
choosing   which action comes next, by Q or by a control; elements that are left alone, by their names
graph      the folder: screens, edges, merges, starts; written step by step, read by many
found      what was found, in numbers; ways through the graph
phrasing   words for elements, outcomes and screens, from the names that an environment tells
rows       grounding rows from it
tasks      tasks from it: paths that can be replayed, for suite `explored`
"""
