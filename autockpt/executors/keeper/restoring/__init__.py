"""Shards that other ranks or nodes need for a restore."""
