"""How a training ends: the last checkpoint, announced stops, letting go."""
