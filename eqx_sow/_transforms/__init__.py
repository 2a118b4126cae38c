"""The public transforms, on top of everything else."""
