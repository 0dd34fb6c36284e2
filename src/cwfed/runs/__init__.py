"""A run and what it leaves: its folder, checkpoints, summary, models, and how it is resumed."""
