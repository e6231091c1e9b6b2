"""What a job and its machine are: ranks, state, failure domains, earlier failures."""
