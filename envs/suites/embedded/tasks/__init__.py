"""Task templates: each is a class whose instances are one seeded episode.

mini              what the scenes of suite `mini` share, its plain buttons, and the slide shows of suite `recall`
mini_scenes       behind menus, pages, tabs, scrolling and folders; check boxes, drop-downs, files to delete
desk              what the scenes of suite `desk` share
panels            controls on a panel or on tabs
forms             log-in, sign-up, an order, a wizard
settings          the settings application
files             the file manager
small             small applications: tool box, menus, editor, calculator, lists, contacts, chores
specs             controls described by data
words             words that the lettered screens are filled with
"""
