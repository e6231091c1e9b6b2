"""Connections between keepers: discovery, handshake, control plane and bulk transfers."""
