"""What is wanted of one H200 in bf16, and of a CPU: the numbers that rows are held against, each named.

Speed over other sides is that of real tokens a second, in one run, with the same weights and tokens.
"""

from __future__ import annotations

# TFLOP/s of a large product, and GB/s (read and written) of a large copy, on the H200
H200_TFLOPS, H200_GB = 790.0, 4300.0

# share of the product's rate that pre-training BERT-Large reaches
RELEASE, TARGET, GOAL = 0.50, 0.60, 0.66
# tokens a second of BERT-Large: forward, backward and LAMB of both losses
PRETRAINING = {"128": 252_000, "512": 238_000, "Wikipedia's mix": 242_000}
# times faster than transformers: (sdpa as it comes, its best: compiled and sorted)
PRETRAINING_FACTORS = (3.0, 1.5)
INFERENCE_FACTORS = (2.5, 1.3)

LAMB_MS = 4.5  # BERT-Large, bf16 weights with fp32 masters
NORM_SHARE = 0.85  # of the copy's rate: dropout + residual + LayerNorm
ATTENTION_TFLOPS = {"fwd": 350.0, "bwd": 250.0}  # heads of 64, 512 tokens
CROSS_ENTROPY_MEMORY = 1 / 8  # of whole logits

# a CPU: row -> side -> times faster than it
CPU_FACTORS = {
    "test_training_step[wikipedia-512]": {"reference": 2.3},
    "test_minilm_mixed_lengths": {"transformers, padded": 4.0, "transformers, sorted in 16": 1.5},
    "test_minilm_full_length": {"transformers, padded": 1.0},
}
CPU_PRODUCT_SHARE = 0.80  # of the machine's own fp32 product over a forward pass
