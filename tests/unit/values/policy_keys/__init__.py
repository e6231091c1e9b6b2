"""Values: round trips, refusals, units."""
