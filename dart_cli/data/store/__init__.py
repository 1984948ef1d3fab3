"""The run's database: the only code that knows SQLite. Nothing in here imports the rest of data.

open        open_reader, open_store; where the file is, and the lock of its one writer
reader      Reader: typed queries by id, state or order
analytics   aggregates for status, view and inspection: curves, metrics, usage, sizes, judges
writer      Store: a Reader that also writes groups, trajectories, steps, batches, weights, decisions
connection  one connection, reading or writing, and errors of SQLite with their cure
rows        what the queries return
steps       a step's row, and its numbers as blobs
schema.sql  the tables
"""
