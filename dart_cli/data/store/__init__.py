"""The run's database: the only room that touches SQLite."""
