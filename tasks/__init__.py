"""What happens: the stages, one file each, and the two rooms where engines run."""
