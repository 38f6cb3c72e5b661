"""Hypothesis profiles: a short default, and `TANDEM_HYPOTHESIS=soak`."""

import os

from hypothesis import HealthCheck, settings

_ALWAYS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("default", max_examples=60, **_ALWAYS)
settings.register_profile("soak", max_examples=6000, **_ALWAYS)
settings.load_profile(os.environ.get("TANDEM_HYPOTHESIS", "default"))
