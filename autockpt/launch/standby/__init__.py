"""A parked process per rank, which has imported what the rank did and takes its place after it."""
