"""A run and its folder: checkpoints, summary, models, and how it is resumed."""
