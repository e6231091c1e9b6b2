"""Plan which bytes a restore reads and where each piece goes: pure."""
