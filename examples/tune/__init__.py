"""The parts of examples/finetune.py."""
