"""Memory that holds shards and parity of other nodes, and the transfers into it."""
