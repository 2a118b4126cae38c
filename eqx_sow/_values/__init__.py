"""Values: what was captured, on its way to what comes back."""
