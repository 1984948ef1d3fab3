"""What every process of a run needs: its life, its children, logs, progress and tables.

role         the life of one role's process: start, signals, end
run_dir      its name in the run directory, and the configuration kept there
supervisor   child processes: started, restarted, ended together
commands     the command lines of a run's processes
liveness     whether the processes of a run live, and what they are doing
stack_dump   SIGUSR1 dumps all stacks to the log
logs         log lines to the terminal and to the run directory
background   coroutines that run while a block runs
phase_timer  seconds by phase
sqlite_file  a file of SQLite, whose failures are one line with the cure
telemetry    what the data process publishes, with a warning when it falls silent
waits        what a process waits for, told to the person who started it
chat         a client of models behind the OpenAI chat API
http_guard   who may ask an HTTP server of ours: Host header, methods, token
http_server  its socket and its limits
kept_folder  the folder of long work that a second start goes on with
streams      standard output and error, whose reader may be gone
progress     how far a long command is
tables       how tables on a page look
palette      the colours of pictures and pages
"""
