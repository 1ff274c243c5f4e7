"""Stand-ins for other packages, each imported only when it is asked for: sonicmoe."""
