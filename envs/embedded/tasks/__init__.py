"""Task templates: each is a class whose instances are one seeded episode.

mini              what the scenes of suite `mini` share, and its plain buttons
mini_navigation   scenes behind menus, pages, tabs, scrolling and folders
mini_forms        check boxes, drop-downs, files to delete
recall            slide shows with a question about one of their pictures
desk              what the scenes of suite `desk` share
panels            controls on a panel or on tabs
forms             log-in, sign-up, an order, a wizard
settings          the settings application
files             the file manager
small             small applications: tool box, menus, editor, calculator, lists, contacts, chores
specs             controls described by data
words             words that the lettered screens are filled with
"""
