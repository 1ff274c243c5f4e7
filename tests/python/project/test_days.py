"""Turns by day (support/days.py)."""

import days
import pytest


def test_each_day_has_one_and_the_next_day_the_next(monkeypatch):
    found = []
    for day in range(20785, 20788):
        monkeypatch.setenv("SONICMOE_DAY", str(day))
        found += days.of_today("abc")
        skipped = [days.turn(number, of=3).args[0] for number in range(3)]
        assert skipped == [day % 3 != number for number in range(3)]
    assert sorted(found) == ["a", "b", "c"]


def test_without_a_day_all_run(monkeypatch):
    monkeypatch.delenv("SONICMOE_DAY", raising=False)
    assert days.of_today("abc") == ["a", "b", "c"] and not days.turn(1, of=3).args[0]


def test_a_day_is_today_or_a_number(monkeypatch):
    monkeypatch.setenv("SONICMOE_DAY", "today")
    assert days.day() > 20000
    monkeypatch.setenv("SONICMOE_DAY", "monday")
    with pytest.raises(ValueError, match="SONICMOE_DAY is 'monday', must be today or a number"):
        days.day()
