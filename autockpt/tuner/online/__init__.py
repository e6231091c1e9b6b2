"""The controller of a live run: estimates, proposals, back-off and rollback."""
