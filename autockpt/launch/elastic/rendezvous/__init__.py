"""Who meets whom before the ranks start: members, their numbers, spares, and stores."""
