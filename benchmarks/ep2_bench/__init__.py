"""The program that ep2.py runs on each rank, worker.py, and its parts."""
