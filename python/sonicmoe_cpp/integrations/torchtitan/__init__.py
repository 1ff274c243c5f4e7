"""torchtitan 0.3: overrides, models and data.

docs/torchtitan.md says how to use them. Importing this package imports no part of torchtitan.
"""
