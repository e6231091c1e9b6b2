"""The trainer's side of the keeper. It runs in the trainer's process."""
