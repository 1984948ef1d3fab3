"""Parts with which several suites are built.

inputs           mouse and keyboard as events: one state machine, one table of key names
taskfile         task files in OSWorld's JSON schema, and the verdicts of their checks
draws            random values that a task takes from its seed
json_paths       paths into JSON values
textfiles        text files as other programs write them: encodings, line ends, TOML
atspi_tree       an accessibility tree as nodes for an explorer
resource_pools   guests or devices that an option names, each used by one slot at a time
child_program    a program in another interpreter that answers requests over its pipes
process_tree     a process with all processes that it started
miniwob_pages    the pages of MiniWoB++'s tasks
app_server       a web application that is started, watched and ended
shared_servers   servers of web applications that all environments of a process share
browser/         a headless Chromium, whose pages draw and pass time on command
remote/          parts of environments behind a server: addresses, replies, screenshots
"""
