"""Tools that several suites are built with.

inputs          mouse and keyboard as events: one state machine, one table of key names
taskfile        task files in OSWorld's JSON schema, and how they are judged
atspi_tree      an accessibility tree as nodes for an explorer
child_program   a program in another interpreter, asked over its pipes
process_tree    a process with all processes that it started
remote/         what environments behind a server share: addresses, replies, screenshots
"""
