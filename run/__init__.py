"""The folder of a run: its configuration, rows and checkpoints.

Does not import torch.
"""
