"""What `autockpt doctor` looks at: one file per part of the machine, each returning findings."""
