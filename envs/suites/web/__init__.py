"""Tasks on a web application of the user's own, from one file: `web:FILE.toml`.

env        WebEnv, which implements the GuiEnv contract, and the suite `web`
file       FILE.toml, read and checked before anything starts
schema     its tables
checking   what a check reads, what it wants, and the verdict of all checks of a task
solution   the actions of a task's solution, on elements of the page
locate.js  finds an element of the page by a selector and its text
"""
