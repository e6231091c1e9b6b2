"""The parts of a policy key: its row and the kind of its value.  `values.goal` has the rows."""
