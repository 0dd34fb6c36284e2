"""The base of everything: messages, maths, randomness, errors, events, files. Imports nothing else of cwfed."""
