"""Text to tokens: words of letters and digits, lower case; 0 is padding, 1 any unknown word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

LENGTH = 100
"""The number of words of a text that are used; AG News has 40 on average."""
VOCABULARY = 100_000
"""The most frequent words that get a token of their own."""

PADDING, UNKNOWN = "<padding>", "<unknown>"


def words_of(text: str) -> list[str]:
    """
    >>> words_of("Wall St. Bears Claw Back, 3-to-1")
    ['wall', 'st', 'bears', 'claw', 'back', '3', 'to', '1']
    """
    return re.findall(r"[^\W_]+", text.lower())


def vocabulary(texts: Iterable[str]) -> tuple[str, ...]:
    """The words by falling frequency, ties in alphabetical order."""
    counts = Counter(word for text in texts for word in words_of(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (PADDING, UNKNOWN, *ranked[: VOCABULARY - 2])


def encode(texts: Sequence[str], words: Sequence[str], length: int = LENGTH) -> NDArray[np.int32]:
    """Tokens of each text, padded or cut to the same length."""
    token = {word: i for i, word in enumerate(words)}
    out = np.zeros((len(texts), length), dtype=np.int32)
    for row, text in zip(out, texts, strict=True):
        tokens = [token.get(word, 1) for word in words_of(text)[:length]]
        row[: len(tokens)] = tokens
    return out
