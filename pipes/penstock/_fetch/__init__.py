"""One task: indices in, a batch out. Knows no thread and no process."""
