"""Storing the keys and values of the fed tokens in the pages: the contract.

    pages[k, slots[t] // B, slots[t] % B] = tensor[t, k]

key, value               [T, K, D]     rounded to the dtype of the pages where theirs is another; any strides
slots                    [T]           int64, block * B + offset, distinct
key_pages, value_pages   [K, N, B, D]  contiguous, written in place; slots not named keep their contents
"""
