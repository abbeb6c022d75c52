"""Measurements of single kernels: their time, and whether their bits depend on the batch. Must not know any system."""
