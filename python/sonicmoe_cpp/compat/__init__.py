"""Replacements of other packages, which are imported only on request: sonicmoe."""
