"""To look at loaders: measure them, compare them, and explain what they have saved."""
