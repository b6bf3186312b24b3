"""Pure functions of (seed, epoch, position)."""
