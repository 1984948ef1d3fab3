"""OSWorld: desktops behind a guest server's HTTP interface, in containers or already running.

suite                suite `osworld`: its task files and options
env                  OsworldEnv, which keeps the GuiEnv contract
provider             provides guests, and limits how many boot at once
container            virtual machines in containers
guest                a client of a guest server's HTTP interface
accessibility        the guest's accessibility tree, as text and as widgets
actions              writes GUI actions as commands for a guest
input_controller     the program in the guest that moves the mouse and presses keys
setup                performs set-up steps
downloads            fetches files from the web and keeps them between episodes
evaluate             returns the verdict on a guest's state
evaluator_process    runs OSWorld's own evaluators in a separate process with a deadline
evaluator_program    the program of that process
classify             reads task files and lists what each task needs
"""
