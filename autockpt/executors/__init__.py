"""WHO DOES IT?  Layout and protocol (pure), memory, snapshot, keeper, persist, restore, guard.

Executors follow a CheckpointPlan and know nothing of how it was chosen.
"""
