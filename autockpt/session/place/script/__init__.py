"""The code of the user: its frames, loops and objects, and values that a checkpoint lacks."""
