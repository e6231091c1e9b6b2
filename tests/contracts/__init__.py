"""The six frozen contracts as base classes: every implementation subclasses its suite."""
