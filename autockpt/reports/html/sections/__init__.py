"""The sections of the page, in reading order; each is a function from the model to markup.

A section that has nothing to say returns None and disappears from the navigation too.
"""
