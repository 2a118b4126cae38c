"""What is done at a sow: capture, replace, or send."""
