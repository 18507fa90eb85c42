"""What happens: the stages, one file each, and two packages where engines run."""
