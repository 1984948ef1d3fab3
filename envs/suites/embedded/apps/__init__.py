"""Applications with many screens, for suite `apps`: menus, dialogs, tabs, lists whose rows open pages.

application   the base class: pages with a way back, a menu bar, questions, the oracle's way to a page
mail          a mail client
shop          a shop
centre        a settings centre
"""
