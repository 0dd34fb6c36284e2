"""Colours that stay apart without colour vision (Okabe and Ito), with a line style and a marker for each."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#A6761D")
DASHES = ("solid", "dash", "dot", "dashdot")
"""Plotly's names."""
STROKES = ("-", "--", ":", "-.")
"""Matplotlib's names of the same."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
HATCHES = ("", "//", "..", "xx", "--", "||")
SYMBOLS = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star", "triangle-left", "triangle-right",
)  # fmt: skip
"""Plotly's names of the markers."""
SEQUENTIAL = ((0, "#f3f7fb"), (0.25, "#bcd3ea"), (0.5, "#6aa3d5"), (0.75, "#2a6fb0"), (1, "#08306b"))
"""Light to dark blue: order can be told without colour."""
DIVERGING = ((0, "#8c510a"), (0.25, "#d8b365"), (0.5, "#f5f5f5"), (0.75, "#5ab4ac"), (1, "#01665e"))
"""Brown below zero, blue-green above; no pair of red and green."""
