"""`python -m tests.cases [NAME...]`: runs the cases and prints a line for each."""

import sys

from tests.cases.runner import CASES, main

if __name__ == "__main__":
    sys.exit(main(CASES, sys.argv[1:]))
