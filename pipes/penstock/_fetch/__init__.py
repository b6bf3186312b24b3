"""One task: indices in, a batch out. Nothing here knows of threads or processes."""
