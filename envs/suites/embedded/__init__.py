"""The embedded environment: a small widget toolkit drawn with Pillow, and tasks built from it.

    theme.py      the colours, and the palette in which a screen is drawn
    draw.py       the canvas: flat fills, cached anti-aliased shapes and text; encoded as PNG or JPEG
    widgets.py    the widget protocol (measure, place, paint, handle events), containers, simple widgets
    controls.py   buttons, check boxes, radios, toggles, tabs, sliders; scrolling views, rows of lists
    textfield.py  an editable line of text
    menus.py      drop-downs, menus, modal dialogs
    marks.py      widgets without letters, for suite `mini`
    app.py        layers of widgets (windows, modal dialogs, pop-ups), focus, event dispatch
    scene.py      one instance of a task: its state, its layers, its evaluator, its solution
    env.py        EmbeddedEnv, which implements the GuiEnv contract, and a screen as nodes for an explorer
    suites.py     the suites, with their templates and sizes
    tasks/        the task templates
    apps/         applications with many screens, and their tasks

A screen is a function of state: after each event the layers are built again from the scene's state, placed
and painted. Widgets have no state; what must persist from one event to the next (focus, caret, scroll
offsets, the open drop-down) is in `Ui`.
"""
