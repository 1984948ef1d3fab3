"""Is everything here that a run needs? `dart doctor`.

    findings   a Finding: subject, level, what is so, the cure; how they are told
    machine    this host: Python, packages, GPUs, programs, memory, limits
    run        one configuration on this host: mistakes, directory, ports, model, tasks
    play       one episode end to end, environment and engine in this process
    parity     engine against trainer on the same tokens, over the drawn screens of `trial`
    examine    all of them in order

Every question to another program has a deadline. Nothing is written but by `play`'s environment.
"""
