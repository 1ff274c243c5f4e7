"""Ways into other projects, each imported only when it is asked for: hf, torchtitan, prime_rl."""
