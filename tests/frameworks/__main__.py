"""`python -m tests.frameworks NAME...`: the tests of these frameworks; see runner.py."""

import sys

from tests.frameworks.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
