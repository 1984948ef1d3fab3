"""What an environment is: for those who write one, and for the code that plays one.

base             tasks, observations, verdicts, and GuiEnv, the protocol of an environment
actions          typed GUI actions, in pixels of the screenshot, and their table for the documentation
registry         suites by name, the environments that play them, and tasks by pattern
methods          calls of an environment's methods, with errors that name what the method must take and return
options          the options of suites, checked by their type annotations
screenshots      encoded screenshots: as observations, decoded, converted
observed_texts   the texts beside a screenshot: an accessibility tree, a terminal
elements         what an explorer needs: the elements on a screen, and an id for each screen
queueing         waits for what several environments share; the deadline of a call stands still meanwhile
own_code         classes that a user writes, loaded by name
blobs            names of stored bytes, and the image format of a screenshot
"""
