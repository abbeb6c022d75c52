"""Hypothesis without clocks: how long an example takes says how busy the machine is, and nothing about the code."""

from hypothesis import HealthCheck, settings

settings.register_profile("corun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("corun")
