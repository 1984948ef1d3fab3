"""`dart doctor`: check whether this host has everything that a run needs.

    examine         runs all checks in order and prints their findings (runtime/findings.py)
    machine         checks this host: Python, packages, GPUs, programs, memory, limits, also for a run's slots
    vllm_parts      checks what vLLM needs on a host with GPUs: a C compiler, Python's headers, a driver
    guests          finds virtual machines on this host that a killed `dart env` left running
    run_checks      checks a configuration: mistakes, directory, ports, model, family, numbers, tasks
    plan            plans what a run will take, from the pure formulas of two modules:
                    trainer_memory (one trainer rank) and host_memory (main memory and disks)
    fit             compares a plan with the resources of a host, with a hint if it does not fit
    plan_findings   compares the plan of a configuration with this host, and writes it as text
    trial_episode   plays one episode end to end, with environment and engine in this process
    logprob_check   compares log-probabilities of engine and trainer on the same tokens

Every call of another program has a deadline. Only the environment of `trial_episode` writes anything.
"""
