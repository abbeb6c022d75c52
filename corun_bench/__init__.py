"""The benchmark: systems driven side by side by one client loop, and what was measured.

An application over everything else: it may import any part of the project, and nothing but the command line imports it.
"""
