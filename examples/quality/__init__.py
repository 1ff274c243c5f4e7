"""The parts of quality_study.py."""
