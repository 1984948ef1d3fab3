"""Task templates: each is a class of scenes, and an instance is the scene of one seeded episode.

mini          the base class of suite `mini`, its plain buttons, and the slide show of suite `recall`
mini_scenes   scenes of suite `mini` with menus, pages, tabs, lists, folders, check boxes, files to delete
desk          the base class of suite `desk`, and the moves of its solutions
panels        scenes with controls on a panel or on tabs
forms         scenes with forms: log-in, sign-up, an order, a wizard
settings      scenes in a settings application
files         scenes in a file manager
small         small applications: tool box, menus, editor, calculator, lists, contacts, chores
specs         controls that are described by data, and values for them
words         the words on lettered screens
"""
