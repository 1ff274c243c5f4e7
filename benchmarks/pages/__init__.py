"""Makes the tables and plots of README.md and docs/ from records; measures nothing."""
