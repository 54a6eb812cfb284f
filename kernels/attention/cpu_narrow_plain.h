// Products of a tile of keys, or of values, with lanes: numbers as they lie in the rows, float32 or pairs of bfloat16.
#pragma once

#include "../native/simd.h"
#include "cpu_narrow.h"

namespace batchgen {
namespace {

// Numbers multiplied one by one in float32.
struct Single {
    using Operand = float;
    static Vec power(Vec x) { return exp2<6>(x); }

    template <class Q>
    static void keep_query(Scratch& s, int lane, const Q* row, int width) {
        float* out = s.query[lane];
        int at = 0;
        for (; at + WIDTH <= width; at += WIDTH) store(out + at, load(row + at));
        if (at < width) store(out + at, load_part(row + at, width - at));
    }

    // The products with N lanes; lane i of a vector is key i.
    template <int N, int FIXED>
    static void score(Scratch& s, int lane, const Strip& keys, int given) {
        const int width = FIXED ? FIXED : given;
        for (int first = 0; first < TILE; first += WIDTH) {
            Vec sums[N][WIDTH];
            for (int key = 0; key < WIDTH; ++key) {
                keys.fetch(first + key, width * sizeof(float));
                const float* row = reinterpret_cast<const float*>(keys.row(first + key, width * sizeof(float)));
                Vec sum[N] = {};
                int at = 0;
                for (; at + WIDTH <= width; at += WIDTH) {
                    const Vec k = load(row + at);
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) sum[n] = fma(load(s.query[lane + n] + at), k, sum[n]);
                }
                if (at < width) {
                    const Vec k = load_part(row + at, width - at);
                    for (int n = 0; n < N; ++n) sum[n] = fma(load(s.query[lane + n] + at), k, sum[n]);
                }
                for (int n = 0; n < N; ++n) sums[n][key] = sum[n];
            }
            for (int n = 0; n < N; ++n) store(s.scores[lane + n] + first, sum_each(sums[n]) * keys.scale(first));
        }
    }

    template <int N, int SLAB>
    static BATCHGEN_INLINE void gather_slab(Scratch& s, int lane, const Strip& values, const float (*chances)[TILE],
                                            int first, int width) {
        Vec sums[N][SLAB];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < SLAB; ++v)
                sums[n][v] = load(s.output[lane + n] + first + v * WIDTH) * splat(s.correction[lane + n]);
        for (int key = 0; key < TILE; ++key) {
            const float* row = reinterpret_cast<const float*>(values.row(key, width * sizeof(float))) + first;
#pragma GCC unroll 4
            for (int v = 0; v < SLAB; ++v) {
                const int left = width - first - v * WIDTH;
                const Vec value = left >= WIDTH ? load(row + v * WIDTH) : load_part(row + v * WIDTH, left);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sums[n][v] = fma(splat(chances[n][key]), value, sums[n][v]);
            }
        }
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < SLAB; ++v) store(s.output[lane + n] + first + v * WIDTH, sums[n][v]);
    }

    // output = output * correction + chances times values.
    template <int N, int FIXED>
    static void gather(Scratch& s, int lane, const Strip& values, int given) {
        constexpr int SLAB = WIDTH == 16 ? 4 : 2;
        const int width = FIXED ? FIXED : given;
        alignas(64) float chances[N][TILE];
        for (int n = 0; n < N; ++n)
            for (int at = 0; at < TILE; at += WIDTH)
                store(chances[n] + at, load(s.chances[lane + n] + at) * values.scale(at));
        for (int key = 0; key < TILE; ++key) values.fetch(key, width * sizeof(float));
        int at = 0;
        for (; at + SLAB * WIDTH <= width; at += SLAB * WIDTH) gather_slab<N, SLAB>(s, lane, values, chances, at, width);
        for (; at < width; at += WIDTH) gather_slab<N, 1>(s, lane, values, chances, at, width);
    }

    static Vec result(const float* sums, int at) { return load(sums + at); }
};

#if defined(__AVX512BF16__)
// Neighbouring bfloat16 multiplied in pairs. Sums of values are kept with numbers 0-3, 8-11, 16-19, 24-27 of 32 in the
// first vector and the others in the second, as the interleaving of two rows leaves them.
struct Pairs {
    using Operand = bfloat16;
    static constexpr int STEP = 2 * WIDTH;
    static Vec power(Vec x) { return exp2_rough(x); }

    static __m512i read(const bfloat16* p, int count) {
        if (count >= STEP) return _mm512_loadu_si512(p);
        return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
    }

    static const bfloat16* row(const Strip& strip, int key, int width) {
        return reinterpret_cast<const bfloat16*>(strip.row(key, width * sizeof(bfloat16)));
    }

    static void keep_query(Scratch& s, int lane, const bfloat16* row, int width) {
        std::memset(s.query[lane], 0, (width + STEP) * sizeof(bfloat16));
        std::memcpy(s.query[lane], row, width * sizeof(bfloat16));
    }

    static Vec dot(Vec sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

    template <int N, int FIXED>
    static void score(Scratch& s, int lane, const Strip& keys, int given) {
        const int width = FIXED ? FIXED : given;
        Vec sums[N][WIDTH];
        for (int key = 0; key < WIDTH; ++key) {
            keys.fetch(key, width * sizeof(bfloat16));
            Vec sum[N] = {};
            for (int at = 0; at < width; at += STEP) {
                const __m512i k = read(row(keys, key, width) + at, width - at);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[n] = dot(sum[n], _mm512_loadu_si512(s.query[lane + n] + at / 2), k);
            }
            for (int n = 0; n < N; ++n) sums[n][key] = sum[n];
        }
        for (int n = 0; n < N; ++n) store(s.scores[lane + n], sum_each(sums[n]) * keys.scale(0));
    }

    template <int N, int SLAB>
    static BATCHGEN_INLINE void gather_slab(Scratch& s, int lane, const Strip& values, const float (*chances)[TILE / 2],
                                            int first, int width) {
        Vec sums[N][2 * SLAB];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < 2 * SLAB; ++v)
                sums[n][v] = load(s.output[lane + n] + first + v * WIDTH) * splat(s.correction[lane + n]);
        for (int key = 0; key < TILE; key += 2) {
            const bfloat16 *a = row(values, key, width) + first, *b = row(values, key + 1, width) + first;
            Vec chance[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) chance[n] = splat(chances[n][key / 2]);
#pragma GCC unroll 2
            for (int v = 0; v < SLAB; ++v) {
                const int left = width - first - v * STEP;
                const __m512i one = read(a + v * STEP, left), two = read(b + v * STEP, left);
                const __m512i low = _mm512_unpacklo_epi16(one, two), high = _mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    sums[n][2 * v] = dot(sums[n][2 * v], low, (__m512i)chance[n]);
                    sums[n][2 * v + 1] = dot(sums[n][2 * v + 1], high, (__m512i)chance[n]);
                }
            }
        }
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < 2 * SLAB; ++v) store(s.output[lane + n] + first + v * WIDTH, sums[n][v]);
    }

    template <int N, int FIXED>
    static void gather(Scratch& s, int lane, const Strip& values, int given) {
        const int width = FIXED ? FIXED : given;
        alignas(64) float chances[N][TILE / 2];
        for (int n = 0; n < N; ++n)
            store(reinterpret_cast<bfloat16*>(chances[n]), load(s.chances[lane + n]) * values.scale(0));
        for (int key = 0; key < TILE; ++key) values.fetch(key, width * sizeof(bfloat16));
        int at = 0;
        for (; at + 2 * STEP <= width; at += 2 * STEP) gather_slab<N, 2>(s, lane, values, chances, at, width);
        for (; at < width; at += STEP) gather_slab<N, 1>(s, lane, values, chances, at, width);
    }

    static Vec result(const float* sums, int at) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const int base = at / STEP * STEP;
        const Vec one = load(sums + base), two = load(sums + base + WIDTH);
        return _mm512_permutex2var_ps(one, at == base ? low : high, two);
    }
};
#endif

}  // namespace
}  // namespace batchgen
