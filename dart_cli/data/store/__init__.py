"""The run's database, in SQLite. No module of this package imports the rest of `data`.

open        opens the database for reading or writing, with a lock for its one writer
reader      Reader: typed queries by id, state or order
analytics   aggregates for status, view and inspection: curves, metrics, usage, sizes, judges
writer      Store: a Reader that also writes
connection  a connection for reading or writing, and SQLite's errors with their fix
rows        the rows that the queries return
steps       the row of a step, with its numbers as blobs
schema.sql  the tables
"""
