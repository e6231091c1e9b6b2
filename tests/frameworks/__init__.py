"""Adapters against the real frameworks: `make test-frameworks`; what is not installed skips."""
