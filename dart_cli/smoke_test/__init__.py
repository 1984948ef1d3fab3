"""`dart up CONFIG --smoke-test`: play a configuration in miniature on this machine, up to its export.

    run_smoke_test         the whole smoke test: plan, parts, problems, report
    config_changes         the keys of the configuration that are changed, and by what
    published_model_files  the small files of a model whose folder is not here
    miniature_model        the user's model with about a thousandth of its parameters
    token_chain            weights that make the miniature write actions in the user's action language
    spellings              texts that mean one action, in tokens that all differ
    coin_suite             a suite whose verdicts are decided by a coin, so that groups have a gradient
    time_budget            the time of a smoke test, and how much of a run fits into it
    pass_timer             measures a pass of the model on this machine
    interruption           ends the smoke test early, at a signal or when its time is over
    parts_player           plays run, evaluation and export by the commands that a person would type
    stored_run             reads the played run, and finds mistakes that only a smoke test can find
    export_check           compares the export's log-probabilities with those of the published weights
    smoke_report           the table and the line of JSON

This package may import `doctor`, `export` and `suite_check`, because it runs their commands unchanged and
reads what they store.
"""
