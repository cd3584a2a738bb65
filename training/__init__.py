"""The parts of a training run: optimizers, checkpoints, evaluation, records, processes."""
