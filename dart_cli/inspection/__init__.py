"""Looking into a run: its rows, its stories, its plots, its report."""
