"""The elastic launcher: agent, node numbers, crash loops and signals."""
