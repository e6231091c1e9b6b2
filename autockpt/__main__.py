"""`python -m autockpt` is the `autockpt` command."""

from autockpt.cli import main

if __name__ == "__main__":
    main()
