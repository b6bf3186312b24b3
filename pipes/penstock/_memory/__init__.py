"""Where batches lie."""
