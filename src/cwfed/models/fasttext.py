"""fastText. Joulin et al., Bag of Tricks for Efficient Text Classification, 2017."""

from __future__ import annotations

from torch import Tensor, nn

from cwfed.core.errors import ConfigError
from cwfed.core.shape import InputShape


class FastText(nn.Module):
    """The mean of the word embeddings, a hidden linear layer, output. Token 0 is padding.

    The embedding's gradient is sparse: a batch has a few hundred words, the vocabulary a hundred thousand.
    """

    output_layer = "output"

    def __init__(self, shape: InputShape, classes: int, hidden: int = 32) -> None:
        super().__init__()
        if not shape.vocabulary:
            raise ConfigError("the model fasttext needs text, these data are not")
        self.embedding = nn.Embedding(shape.vocabulary, hidden, padding_idx=0, sparse=True)
        self.fc = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits. The padding's embedding stays zero, so the sum over all positions is that of the words."""
        words = (tokens != 0).sum(1, keepdim=True).clamp_min(1)
        out: Tensor = self.output(self.fc(self.embedding(tokens).sum(1) / words))
        return out
