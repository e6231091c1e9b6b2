"""The protocol's state machine of one node: pure, events in and instructions out."""
