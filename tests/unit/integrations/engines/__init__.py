"""Adapters of engines, without the engines: what they ask of a session, and when."""
