// Rotary encoding of one head; see the contract.
#pragma once

#include <cstring>

#include "../native/simd.h"

namespace batchgen {

// Products and sums are rounded to T one by one, as the contract wants it.
template <class T>
inline Vec turned(Vec a, Vec c, Vec b, Vec s) {
    return rounded<T>(a * c) + rounded<T>(b * s);
}

// x and out [width] do not overlap; cos and sin [half].
template <class T>
void turn_head(const T* x, const float* cos, const float* sin, int64_t half, int64_t width, T* out) {
    int64_t at = 0;
    for (; at + WIDTH <= half; at += WIDTH) {
        const Vec a = load(x + at), b = load(x + half + at);
        const Vec c = rounded<T>(load(cos + at)), s = rounded<T>(load(sin + at));
        store(out + at, turned<T>(a, c, b, -s));
        store(out + half + at, turned<T>(b, c, a, s));
    }
    if (const int rest = int(half - at)) {
        const Vec a = load_part(x + at, rest), b = load_part(x + half + at, rest);
        const Vec c = rounded<T>(load_part(cos + at, rest)), s = rounded<T>(load_part(sin + at, rest));
        store_part(out + at, turned<T>(a, c, b, -s), rest);
        store_part(out + half + at, turned<T>(b, c, a, s), rest);
    }
    std::memcpy(out + 2 * half, x + 2 * half, (width - 2 * half) * sizeof(T));
}

}  // namespace batchgen
