"""What is done at a mark: capture, replace, or send."""
