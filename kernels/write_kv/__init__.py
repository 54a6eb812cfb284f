"""Storing the keys and values of the fed tokens in the pages: the contract.

    pages.keys   at [k, slots[t] // B, slots[t] % B]  hold  key[t, k]     pages.values likewise  value[t, k]

key, value  [T, K, D]    any strides; made into codes and scales as kernels/kv_format says, keys turned where the format
                         of the keys has it
slots       [T]          int64, block * B + offset, distinct
pages       LayerPages   written in place; slots not named keep their codes and scales
"""
