"""Where batches live: trees of tensors, buffers, recycled slots, shared memory."""
