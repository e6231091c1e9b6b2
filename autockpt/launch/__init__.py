"""How a process was started: ranks, rendezvous, environment, elastic launcher, sidecars."""
