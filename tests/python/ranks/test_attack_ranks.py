"""A few attacks of attack_ranks.py, of which each run takes others."""

import os
import time

import attack_ranks
import pytest
from days import of_today

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("over", of_today(["gloo", "stand-in"]))
def test_some_attacks(over):
    """Ends after 15 seconds. The seed is a random one, unless SONICMOE_ATTACK_SEED is given."""
    first = int(os.environ.get("SONICMOE_ATTACK_SEED", time.time_ns() // 1000 % 10**6))
    until = time.monotonic() + 15
    for seed in range(first, first + len(attack_ranks.SENTENCES)):
        if time.monotonic() > until:
            break
        try:
            attack_ranks.attack(seed, over)
        except AssertionError as error:
            pytest.fail(f"seed {seed}, {attack_ranks.Plan.of(seed, over)}: {error}")
