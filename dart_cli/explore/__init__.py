"""`dart explore`: the screens of an application that no model was trained on, and what leads from one to another.

run        the verb: what was asked for, checked; what was found
explorer   the slots, which share one memory and one graph
choosers   which action comes next: shortlists by Q or by a control
model      a model folder that picks from a shortlist
chat       a server with the OpenAI chat API that does
deny       elements that are left alone, by their names
graph      the folder: screens, edges, merges, starts; written step by step, read by many
summary    what was found, in numbers
phrasing   words for elements, outcomes and screens, from the names that an environment tells
paths      shortest ways through the graph
rows       grounding rows from it
asker      a chat server writes their queries about outcomes
tasks      tasks from it: paths that can be replayed, for suite `explored`
"""
