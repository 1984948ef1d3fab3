"""`dart view`: pages for the browser on a run, rendered on this host, without scripts.

    server             the server: addresses, access, and one self-contained file instead
    site               templates, addresses and queries, which all pages use
    run_pages          pages of a run, its tasks, groups and trajectories
    compare_pages      the page that compares runs of a folder
    run_charts         charts of one run or of several, over a choice of x axes
    evaluation_pages   pages of a run's evaluations
    graph_pages        pages of an exploration
    screenshot_svg     a screenshot with marks over it, as SVG
    charts             numbers as SVG

dart_cli.inspection reads the run, with a new Reader for each request, so that a live run is not disturbed.
No path of a request is the path of a file, because ids are looked up in the database.
"""
