"""The benchmark: one client loop drives several systems side by side and measures them.

This package is an application on top of everything else: it may import any part of the project, and nothing but the
command line imports it.
"""
