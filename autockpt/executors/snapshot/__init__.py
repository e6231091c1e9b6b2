"""Copies the live state into a slot: plan, engine, device, proof against torn copies."""
