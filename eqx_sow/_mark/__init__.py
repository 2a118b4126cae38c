"""Marking: `sow`, the primitive underneath it, and what its equations say."""
