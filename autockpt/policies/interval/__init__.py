"""Chooses checkpoint intervals: closed forms, failure rates, silent errors, nesting."""
