"""Commands on stored checkpoints: ls, show, verify, convert, push, pull, gc."""
