"""JSON that outlives a process: the rows of `corun batch`, what they claim, and what reproduces a difference."""
