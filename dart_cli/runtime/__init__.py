"""What every process needs: its life, children, logs, progress and tables."""
