"""One task: indices in, a batch out. Independent of threads and processes."""
