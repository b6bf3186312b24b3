"""What each trainer needs beyond an iterable: one file per trainer, imported only by users who want it."""
