"""Ways into other projects, each imported only when it is asked for: hf, megatron, nemo_automodel,
prime_rl, torchtitan."""
