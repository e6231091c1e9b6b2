"""How far are chosen intervals from the best ones?  Scenarios, a fast simulator, a judge."""
