"""The parts that every process of a run needs: its life, its children, logs, findings and tables.

role         runs one role's process: start, signals, end
run_dir      reads and writes a worker's name, the run's configuration and its last state in the run directory
joining      lets a process join its run: the data service compares its settings
supervisor   runs child processes: starts, restarts and ends them together
commands     returns the command lines of a run's processes
liveness     finds out whether the processes of a run live, and what they are doing
logs         logs to the terminal and to the run directory; SIGUSR1 dumps all stacks there
background   runs coroutines while a block runs, and commands that a signal stops
waits        reports what a process waits for, and how its time is spent
findings     makes, prints and counts the findings of `dart doctor` and of a smoke test
sqlite_file  an SQLite file whose failures are one line with the fix
http_server  the parts that HTTP servers share: socket, limits, checks of requests
work_folder  a folder for long work, which a second start continues
streams      writes to standard output and error, even if their reader is gone
options      reads the options of a command as the fields of a dataclass
tables       formats tables and values, and shows the progress of a long command
"""
