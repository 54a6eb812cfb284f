"""Dense matrix product with a weight as checkpoints store it: the contract.

    out = x @ weight.T + bias

x       [T, H]   float32 or bfloat16
weight  [O, H]   dtype of x
bias    [O]      dtype of x, or None
out     [T, O]   dtype of x, new; sums are float32 and rounded once
"""
