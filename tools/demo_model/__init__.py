"""The parts of `train_demo.py`."""
