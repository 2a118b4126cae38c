"""What users get and read: the dict, statistics, tables."""
