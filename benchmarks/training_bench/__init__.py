"""One training run of a paper model, as a program under torchrun (benchmarks/training.py)."""
