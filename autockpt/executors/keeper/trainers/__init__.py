"""The trainers of a node: their connections, their processes, and messages to them."""
