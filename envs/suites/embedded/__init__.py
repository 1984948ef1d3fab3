"""The embedded environment: a small widget toolkit drawn with Pillow, and tasks built from it.

    theme.py      colours and the palette a screen is drawn in
    draw.py       the canvas: flat fills, cached anti-aliased shapes and text; as PNG or JPEG bytes
    widgets.py    widget protocol, containers, simple widgets: measure, place, paint, handle events
    controls.py   buttons, check boxes, radios, toggles, tabs, sliders; scrolling views, rows of lists
    textfield.py  a line of text that is edited
    menus.py      drop-downs, menus, modal dialogs
    marks.py      widgets without letters, for suite mini
    app.py        layers of widgets (windows, modal dialogs, pop-ups), focus, event dispatch
    scene.py      one instance of a task: its state, its layers, its judge, its solution; what a click on a widget answers
    env.py        EmbeddedEnv, which keeps the GuiEnv contract; what an explorer reads of a screen
    suites.py     the suites and what is in them
    tasks/        the task templates
    apps/         applications with many screens, and their tasks

A screen is a function of state: after each event the layers are rebuilt from the scene's
state, placed and painted. Widgets hold no state; what must persist between two events (focus,
caret, scroll offsets, the open drop-down) is in `Ui`.
"""
