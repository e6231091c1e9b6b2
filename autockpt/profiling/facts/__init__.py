"""Facts about a job and its machine: ranks, state, failure domains, earlier failures."""
