"""Episodes played in this process: held-out evaluation, demonstrations, suite checks, by hand."""
