// Products of keys, or of values, with lanes: numbers as they lie in the rows, float32 or pairs of bfloat16.
#pragma once

#include "../native/sideways.h"
#include "../native/simd.h"
#include "cpu_narrow.h"
#include "cpu_narrow_chunks.h"

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
    static void score(Scratch& s, int lane, const Rows& keys, int strip, int given) {
        const int width = FIXED ? FIXED : given;
        for (int first = 0; first < STRIP; first += WIDTH) {
            Vec sums[N][WIDTH];
            for (int key = 0; key < WIDTH; ++key) {
                keys.ahead.fetch(first + key);
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
            for (int n = 0; n < N; ++n)
                store(s.scores[lane + n] + strip * STRIP + first, sum_each(sums[n]) * keys.scale(first));
        }
    }

    template <int N, int SLAB>
    static BATCHGEN_INLINE void gather_slab(Scratch& s, int lane, const Rows* values, int strips,
                                            const float (*chances)[TILE], int first, int width) {
        Vec sums[N][SLAB];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
            for (int v = 0; v < SLAB; ++v)
                sums[n][v] = load(s.output[lane + n] + first + v * WIDTH) * splat(s.correction[lane + n]);
        for (int strip = 0; strip < strips; ++strip) {
            for (int key = 0; key < STRIP; ++key) {
                if (first == 0) values[strip].ahead.fetch(key);
                const float* row = reinterpret_cast<const float*>(values[strip].row(key, width * sizeof(float))) + first;
#pragma GCC unroll 4
                for (int v = 0; v < SLAB; ++v) {
                    const int left = width - first - v * WIDTH;
                    const Vec value = left >= WIDTH ? load(row + v * WIDTH) : load_part(row + v * WIDTH, left);
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n)
                        sums[n][v] = fma(splat(chances[n][strip * STRIP + key]), value, sums[n][v]);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
            for (int v = 0; v < SLAB; ++v) store(s.output[lane + n] + first + v * WIDTH, sums[n][v]);
    }

    // output = output * correction + chances times values.
    template <int N, int FIXED>
    static void gather(Scratch& s, int lane, const Rows* values, int strips, int given) {
        constexpr int SLAB = WIDTH == 16 ? 4 : 2;
        const int width = FIXED ? FIXED : given;
        alignas(64) float chances[N][TILE];
        for (int n = 0; n < N; ++n)
            for (int key = 0; key < strips * STRIP; key += WIDTH)
                store(chances[n] + key, load(s.chances[lane + n] + key) * values[key / STRIP].scale(key % STRIP));
        int at = 0;
        for (; at + SLAB * WIDTH <= width; at += SLAB * WIDTH)
            gather_slab<N, SLAB>(s, lane, values, strips, chances, at, width);
        for (; at < width; at += WIDTH) gather_slab<N, 1>(s, lane, values, strips, chances, at, width);
    }

    static void arrange(float*, int) {}
};

#if defined(__AVX512BF16__)
// Neighbouring bfloat16 multiplied in pairs.
struct Pairs {
    using Operand = bfloat16;
    using Total = Vec;
    static constexpr int BYTES = sizeof(bfloat16), PARTS = 1;
    static Vec power(Vec x) { return exp2_rough(x); }

    static void keep_query(Scratch& s, int lane, const bfloat16* row, int width) {
        std::memset(s.query[lane], 0, (width + STEP) * sizeof(bfloat16));
        std::memcpy(s.query[lane], row, width * sizeof(bfloat16));
    }

    template <int N, int FIXED>
    static void score(Scratch& s, int lane, const Rows& keys, int strip, int given) {
        const int width = FIXED ? FIXED : given;
        Vec sums[N][WIDTH];
        for (int key = 0; key < STRIP; ++key) {
            keys.ahead.fetch(key);
            Vec sum[N] = {};
            for (int at = 0; at < width; at += STEP) {
                const __m512i k = widen(keys.row(key, width * BYTES) + at * BYTES, width - at);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[n] = dot(sum[n], _mm512_loadu_si512(s.query[lane + n] + at / 2), k);
            }
            for (int n = 0; n < N; ++n) sums[n][key] = sum[n];
        }
        for (int n = 0; n < N; ++n)
            store(s.scores[lane + n] + strip * STRIP, sum_each(sums[n]) * keys.scale(0));
    }

    template <int N, int FIXED>
    static void gather(Scratch& s, int lane, const Rows* values, int strips, int width) {
        gather_pairs<Pairs, N, FIXED>(s, lane, values, strips, width);
    }

    static void arrange(float* sums, int width) { arrange_pairs(sums, width); }

    template <int N>
    static void put_chances(Scratch& s, int lane, const Rows* values, int strips, Chances<N>& chances) {
        chances.step = 1;
        for (int strip = 0; strip < strips; ++strip)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n)
                store(reinterpret_cast<bfloat16*>(chances.numbers[n]) + strip * STRIP,
                      load(s.chances[lane + n] + strip * STRIP) * values[strip].scale(0));
    }

    static __m512i widen(const char* row, int count) {
        if (count >= STEP) return _mm512_loadu_si512(row);
        return _mm512_maskz_loadu_epi16((1u << count) - 1, row);
    }

    static Vec dot(Vec sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static Vec floats(Vec sum) { return sum; }
};

// Keys of whole cache lines of bfloat16.
struct PairQuads : Pairs {
    static bool take(int64_t width) { return width * BYTES % LINE == 0; }

    static void keep_query(Scratch& s, int lane, const bfloat16* row, int width) {
        char* out = reinterpret_cast<char*>(s.query[lane]);
        for (int at = 0; at < width; at += STEP, out += QUADS * LINE) put_quads(out, _mm512_loadu_si512(row + at));
    }

    static __m512i read(const char* keys) { return _mm512_loadu_si512(keys); }
    static Vec start(const Scratch&, int) { return Vec{}; }

    static BATCHGEN_INLINE void add(Vec* fours, const __m512i (*keys)[QUADS], const char* query) {
#pragma GCC unroll 4
        for (int i = 0; i < QUADS; ++i)
#pragma GCC unroll 4
            for (int four = 0; four < 4; ++four)
                fours[four] = dot(fours[four], keys[four][i], _mm512_load_si512(query + i * LINE));
    }

    static Vec score(const Scratch&, int, Vec total) { return total; }
};
#endif

}  // namespace
}  // namespace batchgen
