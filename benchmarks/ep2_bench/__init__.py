"""What ep2.py runs on each rank."""
