"""torchtitan: overrides, models and data for 0.3, and an adapter for 0.2.

docs/torchtitan.md says how to use them. Importing this package imports no part of torchtitan.
"""

from ._release_02 import replace, run_experts

__all__ = ["replace", "run_experts"]
