"""Colours that stay apart without colour vision (Okabe and Ito), and a line style for each."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#A6761D")
DASHES = ("solid", "dash", "dot", "dashdot")
