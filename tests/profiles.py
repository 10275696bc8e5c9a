"""How long the generated tests run: briefly and always the same in CI, or for as long as one likes.

``OUTBOX_HYPOTHESIS_PROFILE=thorough`` looks further and elsewhere every time, ``unshrunk`` is CI's without the minutes
it takes to make a failing example small, and ``OUTBOX_HYPOTHESIS_EXAMPLES`` says how far to look. Import ``settings``
from here, not from hypothesis: the profile has to be loaded before the first test is decorated.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, Phase, settings

__all__ = ["PROFILE", "examples", "settings"]

PROFILE: Final = os.environ.get("OUTBOX_HYPOTHESIS_PROFILE", "ci")

# Machines are shared and noisy, so nothing here is timed. An engine lives as long as its test, not as one example.
_untimed = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ci", _untimed, derandomize=True, database=None)
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("thorough", _untimed)
settings.load_profile(PROFILE)


def examples(ci: int, thorough: int) -> int:
    """How many examples a test tries in the profile that is loaded."""
    wanted = os.environ.get("OUTBOX_HYPOTHESIS_EXAMPLES")
    if wanted:
        return int(wanted)
    return thorough if PROFILE == "thorough" else ci
