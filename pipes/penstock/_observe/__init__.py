"""What is seen of a loader that runs: how long everything takes, and what to do about it."""
