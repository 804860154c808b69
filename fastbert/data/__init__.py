"""Text to batches: corpus -> tokenizer -> store -> instances -> masking -> packing -> loader."""
