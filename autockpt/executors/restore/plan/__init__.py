"""What a restore reads and where each piece goes: pure."""
