"""Settings that follow the speed of the storage and of the links, as a run observes it."""
