"""The embedded environment: a small widget toolkit drawn with Pillow, and tasks built from it.

    theme.py      colours and the palette a screen is drawn in
    draw.py       the canvas: flat fills, cached anti-aliased shapes and text
    png.py        the canvas as PNG or JPEG bytes
    widgets.py    what screens are made of: measure, place, paint, answer to events
    app.py        layers of widgets (windows, modal dialogs, pop-ups), focus, event dispatch
    scene.py      one instance of a task: its state, its layers, its judge, its solution
    env.py        EmbeddedEnv, which keeps the GuiEnv contract
    suites.py     the suites and what is in them
    tasks/        the task templates
    phrases.py    single-step instructions of suite mini, and what a click on a widget answers
    grounding.py  single-step screens and questions, for training a base model

A screen is a function of state: after each event the layers are built anew from the scene's
state, placed and painted. Widgets hold nothing; what must live on between two events (focus, caret,
scroll offsets, the open drop-down) is in `Ui`.
"""
