"""OSWorld: desktops behind a guest server's HTTP interface, in containers or already running.

suite                suite `osworld`: task files and options
env                  OsworldEnv, which keeps the GuiEnv contract
provider             where guests come from, and how many boot at once
container            virtual machines in containers
guest                the HTTP interface of a guest's server
accessibility        the guest's accessibility tree as text
actions              GUI actions as commands for a guest
input_controller     the program in the guest that moves mouse and keyboard
setup                set-up steps
downloads            files from the web, kept between episodes
evaluate             the verdict on a guest's state
evaluator_process    OSWorld's own evaluators, in a process with a deadline
classify             what task files need, from reading them
evaluator_program    the program of that process
"""
