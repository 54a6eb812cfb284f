// Small matrix products with a vector for one number of each of several lanes, and the kinds of numbers they take.
// Knows registers and strides; knows nothing of keys or softmax.
#pragma once

#include "../native/simd.h"
#include "cpu.h"

namespace batchgen {
namespace {

// How products are formed. An element is 32 bits: one float, or two neighbouring bfloat16.
struct Single {
    using Operand = float;
    static constexpr int PACK = 1;
    static Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
struct Pairs {
    using Operand = bfloat16;
    static constexpr int PACK = 2;
    static Vec add(Vec sum, Vec a, Vec b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// What a product does besides: multiply what stood in `out` by `factor` and add it, raise `top` to the largest result.
struct Besides {
    const float* factor = nullptr;  // of each lane
    float* top = nullptr;

    Besides from(int lane) const { return {factor ? factor + lane : nullptr, top ? top + lane : nullptr}; }
};

// out[row][lanes] (+)= sum over k of a[row * ROW + k * DEPTH] times b[k][lanes], for C rows and R vectors of lanes.
template <class Kind, int C, int R, int ROW, int DEPTH>
inline void product_block(const float* a, const float* b, int depth, float* out, Besides besides) {
    Vec sums[C][R];
#pragma GCC unroll 24
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            sums[c][r] = besides.factor ? load(out + c * LANES + r * WIDTH) * load(besides.factor + r * WIDTH) : Vec{};
    for (int k = 0; k < depth; ++k) {
        Vec lanes[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) lanes[r] = load(b + k * LANES + r * WIDTH);
#pragma GCC unroll 24
        for (int c = 0; c < C; ++c) {
            const Vec value = splat(a[c * ROW + k * DEPTH]);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[c][r] = Kind::add(sums[c][r], lanes[r], value);
        }
    }
#pragma GCC unroll 24
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) store(out + c * LANES + r * WIDTH, sums[c][r]);
    if (!besides.top) return;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        Vec top = load(besides.top + r * WIDTH);
#pragma GCC unroll 24
        for (int c = 0; c < C; ++c) top = larger(sums[c][r], top);
        store(besides.top + r * WIDTH, top);
    }
}

template <class Kind, int C, int R, int ROW, int DEPTH>
void product_rows(const float* a, const float* b, int depth, float* out, Besides besides, int rows) {
    int row = 0;
    for (; row + C <= rows; row += C)
        product_block<Kind, C, R, ROW, DEPTH>(a + row * ROW, b, depth, out + row * LANES, besides);
    for (; row + 4 <= rows; row += 4)
        product_block<Kind, 4, R, ROW, DEPTH>(a + row * ROW, b, depth, out + row * LANES, besides);
    for (; row < rows; ++row)
        product_block<Kind, 1, R, ROW, DEPTH>(a + row * ROW, b, depth, out + row * LANES, besides);
}

// As product_block, for any number of rows and of vectors: as many at once as there are registers.
template <class Kind, int ROW, int DEPTH>
void product(const float* a, const float* b, int depth, float* out, Besides besides, int rows, int vectors) {
    for (int v = 0; v < vectors;) {
        const Besides part = besides.from(v * WIDTH);
        const float* lanes = b + v * WIDTH;
        float* sums = out + v * WIDTH;
        const int left = vectors - v;
#if defined(__AVX512F__)
        if (left >= 4) {
            product_rows<Kind, 6, 4, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 4;
        } else if (left == 3) {
            product_rows<Kind, 8, 3, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 3;
        } else if (left == 2) {
            product_rows<Kind, 12, 2, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 2;
        } else {
            product_rows<Kind, 16, 1, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 1;
        }
#else
        if (left >= 2) {
            product_rows<Kind, 6, 2, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 2;
        } else {
            product_rows<Kind, 12, 1, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 1;
        }
#endif
    }
}

}  // namespace
}  // namespace batchgen
