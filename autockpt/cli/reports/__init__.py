"""Commands that explain a run: report and explain."""
