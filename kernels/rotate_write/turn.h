// Rotary encoding of one head; see the contract.
#pragma once

#include <cstring>

#include "../kv_format/cpu.h"

namespace batchgen {

constexpr int MAX_HALF = MAX_HEAD_DIM / 2;

// Products and sums are rounded to T one by one, as the contract wants it.
template <class T>
inline Vec turned(Vec a, Vec c, Vec b, Vec s) {
    return rounded<T>(a * c) + rounded<T>(b * s);
}

// The angles of a token as T holds them: cos and sin [half].
template <class T>
struct Angles {
    alignas(64) float cos[MAX_HALF], sin[MAX_HALF];

    Angles(const float* from_cos, const float* from_sin, int64_t half) {
        int64_t at = 0;
        for (; at + WIDTH <= half; at += WIDTH) {
            store(cos + at, rounded<T>(load(from_cos + at)));
            store(sin + at, rounded<T>(load(from_sin + at)));
        }
        if (const int rest = int(half - at)) {
            store_part(cos + at, rounded<T>(load_part(from_cos + at, rest)), rest);
            store_part(sin + at, rounded<T>(load_part(from_sin + at, rest)), rest);
        }
    }
};

// x and out [width] do not overlap.
template <class T>
void turn_head(const T* x, const Angles<T>& angles, int64_t half, int64_t width, T* out) {
    int64_t at = 0;
    for (; at + WIDTH <= half; at += WIDTH) {
        const Vec a = load(x + at), b = load(x + half + at);
        const Vec c = load(angles.cos + at), s = load(angles.sin + at);
        store(out + at, turned<T>(a, c, b, -s));
        store(out + half + at, turned<T>(b, c, a, s));
    }
    if (const int rest = int(half - at)) {
        const Vec a = load_part(x + at, rest), b = load_part(x + half + at, rest);
        const Vec c = load_part(angles.cos + at, rest), s = load_part(angles.sin + at, rest);
        store_part(out + at, turned<T>(a, c, b, -s), rest);
        store_part(out + half + at, turned<T>(b, c, a, s), rest);
    }
    if (2 * half < width) std::memcpy(out + 2 * half, x + 2 * half, (width - 2 * half) * sizeof(T));
}

}  // namespace batchgen
