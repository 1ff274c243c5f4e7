"""Adapters for other projects: hf, megatron, nemo_automodel, prime_rl, torchtitan. Import the
adapter that you need."""
