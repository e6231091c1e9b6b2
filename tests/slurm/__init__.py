"""A real Slurm on this machine, and jobs of autockpt on it: `make test-slurm`."""
