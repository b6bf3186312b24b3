"""Where batches live: trees of tensors, buffers, recycled slots, shared memory, devices; and torch's modes while they
are made.
"""
