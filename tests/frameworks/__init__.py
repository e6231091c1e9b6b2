"""Adapters against the real frameworks: `make test-frameworks`; what is not installed skips.

NAME_driver.py, NAME_training.py    a training as a user of the framework writes it
test_NAME.py                        what the adapter promises
"""
