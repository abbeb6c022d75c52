"""Kernels by themselves: how long each takes, and whether its bits depend on the batch. Must not know any system."""
