"""The process that outlives the trainer: holds the slots, persists them, serves restores.

Torch-free on purpose: it starts in 0.2 s and costs 30 MB.
"""
