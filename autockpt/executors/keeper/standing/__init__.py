"""How checkpoints of a node stand: in status.json, at an endpoint, and in words for people."""
