"""What a trainer needs beyond an iterable: one small file for each, imported only on demand."""
