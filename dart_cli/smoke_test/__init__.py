"""`dart up CONFIG --rehearse`: a configuration played in miniature on the machine at hand, to its export.

    rehearse    all of it: plan, miniature, play, findings, report
    coin_suite  verdicts that give groups a gradient, beside the suite's own
    exported    an export's log-probabilities against those of the published weights
    plan        what is changed of a configuration, and by which factor
    miniature   the user's model, cut to about a thousandth of its numbers
    scripted_weights what that model writes: actions, in the user's action language and tokens
    stand_in    the small files of a model whose folder is not here
    budget      the time that it has, and how much of a run is played in it
    forward_time what a pass of the model takes
    stopping    its end by a signal, or as its time is over
    stages      the run, its evaluation and its export, as the processes that a person would start
    findings    what only a rehearsal sees: prompts, actions, rewards
    report      the table and the line of JSON

A room of its own, above `doctor`, `export` and `suite_check`: it starts the verbs as they are and reads what
they left.
"""
