"""Orders and random numbers as pure functions of (seed, epoch, position), and a watch on the generators that are
not.
"""
