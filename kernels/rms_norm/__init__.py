"""Root mean square normalisation over the last dimension: the contract.

    rms_norm      out = weight * cast(x / sqrt(mean(x^2) + epsilon))
    add_rms_norm  residual = cast(residual + x), out = rms_norm(residual)

The mean, the root and the division are float32 whatever the dtype of x; the result is cast to it before the weight is
applied, so that low precision rounds where `transformers` rounds. The sum is one of the dtype.

x         [..., H]  float32 or bfloat16, any strides; add_rms_norm: [T, H]
residual  [T, H]    dtype of x, contiguous; written in place
weight    [H]       dtype of x
epsilon             above 0
out       [..., H]  dtype of x, new
"""
