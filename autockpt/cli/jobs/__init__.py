"""Commands that start a script: profile, run, tune."""
