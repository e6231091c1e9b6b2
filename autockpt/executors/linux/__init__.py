"""Calls of Linux and glibc: memory, direct I/O, time slices, the allocator of a restore."""
