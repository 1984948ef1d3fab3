"""The env role: slots that lease tasks, play episodes and hand trajectories in."""
