"""The protocol's state machine of the coordinator: pure, events in and instructions out."""
