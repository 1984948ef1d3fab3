"""Whether this host has everything that a run needs: `dart doctor`.

    findings   a Finding: subject, level, what was found, the cure; how it is printed
    machine    this host: Python, packages, GPUs, programs, memory, limits, also those of a run's slots
    vllm_parts what vLLM needs of a host with GPUs: a C compiler, Python's headers, a driver
    guests     virtual machines on this host that a killed `dart env` left
    run_checks one configuration on this host: mistakes, directory, ports, model, its family and numbers, tasks
    plan       what a run will take: memory and disk; from these pure parts:
               shape (the model's sizes), trainer_memory (one rank's), host_room (main memory and disks)
    fit        whether a plan fits what there is, with a hint where it does not
    plan_findings the plan of a configuration against this host, and its text
    trial_episode one episode end to end, environment and engine in this process
    parity     engine against trainer on the same tokens, of drawn screens
    examine    all of them in order

Every call of another program has a deadline. Only the environment of `trial_episode` writes anything.
"""
