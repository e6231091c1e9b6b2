"""Campaigns: many seeded attacks on one promise, each with an oracle and a replay.

    python -m tests.campaigns NAME --count N --seed S --minutes M
    python -m tests.campaigns NAME --seed S --only NUMBER          # one case again

`make test` runs a few of each, `make test-all` as many as fit the time that MINUTES gives.
"""
