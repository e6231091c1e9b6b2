"""Options, texts and decisions that several commands share."""
