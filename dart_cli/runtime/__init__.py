"""What every process of a run needs: its life, its children, logs and tables.

role         the life of one role's process: start, signals, end
run_dir      its name in the run directory, and the configuration kept there
joining      how it joins its run: the data service compares what it was started with
supervisor   child processes: started, restarted, ended together
commands     the command lines of a run's processes
liveness     whether the processes of a run live, and what they are doing
logs         log lines to the terminal and to the run directory; SIGUSR1 dumps all stacks there
background   coroutines that run while a block runs; a verb that a signal stops
waits        what a process waits for, told to the person who started it; where its time goes
sqlite_file  a file of SQLite, whose failures are one line with the cure
http_server  HTTP servers: socket, limits, and who may ask them
work_folder  the folder of long work that a second start goes on with
streams      standard output and error, whose reader may be gone
options      options of commands as the fields of a dataclass
tables       how tables and values on a page look; how far a long command is
"""
