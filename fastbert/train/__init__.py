"""The training loop's parts: trainer (one step), checkpoint, report."""
