"""The colours of lines and marks, in pictures and in the pages of `dart view`.

They can be told apart with any colour vision: six of Okabe and Ito (Color Universal Design, 2008), their
yellow replaced by wine red, which is visible on white. `view.css` has COLOURS as --v0 to --v5.
"""

from __future__ import annotations

BLUE, ORANGE, GREEN, PINK, RED, WINE = (
    *("#0072b2", "#e69f00", "#009e73"),
    *("#cc79a7", "#d55e00", "#882255"),
)
SKY = "#56b4e9"
GREY, INK = "#6b7280", "#111827"

COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, WINE)
"""In the order in which lines get them."""
