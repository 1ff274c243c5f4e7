"""The parts of train_lm.py: configuration, text, model, training, checkpoints, report."""
