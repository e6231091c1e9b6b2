"""Where loop, data and counters stand: stored, put back, and checked at a resume."""
