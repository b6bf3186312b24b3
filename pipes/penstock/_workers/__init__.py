"""Who does tasks: threads and processes. Knows no data."""
