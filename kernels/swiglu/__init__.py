"""The gated activation of the MLP: the contract.

    out = silu(gate) * up,   silu(z) = z / (1 + e^-z)

silu is computed in float32 and rounded to the dtype before the product, as `transformers` does.

gate_up  [T, 2F]  float32 or bfloat16; the gate is the first half of every row, rows may be strided
out      [T, F]   dtype of gate_up, new
"""
