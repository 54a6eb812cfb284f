"""Root mean square normalisation over the last dimension: the contract.

    out = weight * cast(x / sqrt(mean(x^2) + epsilon))

The mean, the root and the division are float32 whatever the dtype of x; the result is cast to it before the weight is
applied, so that low precision rounds where `transformers` rounds.

x        [..., H]  float32 or bfloat16, any strides
weight   [H]       dtype of x
epsilon            above 0
out      [..., H]  dtype of x, new
"""
