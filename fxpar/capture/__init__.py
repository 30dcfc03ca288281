"""Capture: a PyTorch training step as one program of plain data."""
