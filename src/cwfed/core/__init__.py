"""What everything stands on: messages, maths, randomness, errors, events, files. Imports nothing else of ours."""
