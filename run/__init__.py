"""What a run keeps in its folder: its configuration, its rows and its checkpoints.

Does not import torch.
"""
