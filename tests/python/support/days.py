"""Tests that take turns by day. With SONICMOE_DAY=today or a number, as in .ci/run, one of several
runs, and the next one on the next day. Without the variable all run."""

import os
import time


def day():
    """The number of the day, or None if no day was asked for."""
    asked = os.environ.get("SONICMOE_DAY")
    if asked is None:
        return None
    if asked == "today":
        return int(time.time()) // 86400
    if not asked.isdecimal():
        raise ValueError(f"SONICMOE_DAY is {asked!r}, must be today or a number")
    return int(asked)


def of_today(items):
    """The one of `items` whose day it is, as a list; or all of them."""
    items = list(items)
    return items if day() is None else [items[day() % len(items)]]


def is_turn(number, of):
    """Whether a test runs that has its turn when the day modulo `of` is `number`."""
    return day() is None or day() % of == number


def turn(number, of):
    """Marks a test of pytest that runs when is_turn(number, of)."""
    import pytest  # here, because tests/setup_test.py needs nothing but the standard library

    return pytest.mark.skipif(not is_turn(number, of), reason=f"SONICMOE_DAY: every {of} days")
