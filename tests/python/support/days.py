"""Tests that take turns by day. With SONICMOE_DAY=today or a number, as in .ci/run, one of several
runs, and the next one on the next day. Without the variable all run."""

import os
import time

import pytest


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


def turn(number, of):
    """Marks a test that runs on each `of`-th day, from day `number` on."""
    other = day() is not None and day() % of != number
    return pytest.mark.skipif(other, reason=f"runs every {of} days (SONICMOE_DAY)")
