"""Chooses how a checkpoint leaves the device and is written: slots, schedule, write path."""
