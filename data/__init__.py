"""Turn text into tokens and training batches."""
