"""How runs end, with real processes."""
