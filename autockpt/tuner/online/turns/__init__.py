"""Settings of a decision that checkpoints try in turn until the run has seen the best."""
