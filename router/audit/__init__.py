"""Runs that are repeated to be compared: audits of samples, verification, and the crowds that run beside it."""
