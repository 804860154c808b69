"""Fine-tuning: the paper's tasks on any BERT, one small head each."""
