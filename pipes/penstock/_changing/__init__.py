"""What a run changes while it runs, as data in its states. Nothing of it is loaded by a run that changes nothing."""
