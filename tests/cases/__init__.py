"""Jobs as users write them, each with one thing that must hold; README.md says how to write one."""
