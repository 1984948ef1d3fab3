"""The web viewer, `dart view`: what was read of a run as pages on loopback, rendered here, without scripts.

    server             addresses, who may look, the life of the server; one self-contained file instead
    site               what all pages are made with: templates, addresses, queries
    run_pages          the run, its tasks, groups and trajectories
    compare_pages      runs of a folder, side by side
    run_charts         the charts of one run or of several, over a choice of x axes
    evaluation_pages   the run's evaluations, one beside another
    graph_pages        an exploration
    screens            a screenshot with what is drawn over it, as SVG
    charts             numbers as SVG

A run is read by dart_cli.inspection, with a new Reader for each request, so that a live run is not
disturbed. No path of a request is a path of a file: ids are looked up in the database.
"""
