"""Parts of benchmarks/h200.py."""
