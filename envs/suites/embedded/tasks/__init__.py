"""Task templates: each is a class of scenes, and an instance is the scene of one seeded episode.

mini          the base class of suite `mini`, its plain buttons, and the slide show of suite `recall`
mini_scenes   its other scenes: menus, pages, tabs, lists, folders, check boxes, files to delete
desk          the base class of suite `desk`, and the moves of its solutions
panels        controls on a panel or on tabs
forms         log-in, sign-up, an order, a wizard
settings      the settings application
files         the file manager
small         small applications: tool box, menus, editor, calculator, lists, contacts, chores
specs         controls described by data
words         the words on lettered screens
"""
