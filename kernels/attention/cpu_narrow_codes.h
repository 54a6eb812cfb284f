// Products of a tile of keys, or of values, with lanes where the rows are whole numbers of 8 bits: on the codes as they
// lie, in whole numbers that lose nothing. Queries and probabilities become 15 and 16 bits, in two halves of 8.
#pragma once

#include "../native/simd.h"
#include "cpu_narrow.h"

#if defined(__AVX512VNNI__)
namespace batchgen {
namespace {

// int8, for heads of whole cache lines of codes. A vector of four neighbouring numbers of TILE keys is multiplied with
// those of a query; a vector of the same numbers of four keys with the probabilities of these keys.
struct Codes {
    static constexpr int LINE = 64;
    static constexpr float MOST_QUERY = 127 * 128, MOST_CHANCE = 255 * 256;

    static const int8_t* part(const Scratch& s, int lane, int half) {
        return reinterpret_cast<const int8_t*>(s.query[lane]) + half * MAX_HEAD_DIM;
    }

    // As whole numbers up to MOST_QUERY times a step, which is NaN where a number is not finite.
    static void keep_query(Scratch& s, int lane, const bfloat16* row, int width) {
        Ints most{};
        for (int at = 0; at < width; at += WIDTH) {
            const Ints size = (Ints)load(row + at) & 0x7fffffff;
            most = size > most ? size : most;
        }
        const float extent = largest((Vec)most);
        const bool finite = _mm512_reduce_max_epi32((__m512i)most) < 0x7f800000;
        s.step[lane] = finite ? extent / MOST_QUERY : NAN;
        const Vec factor = splat(finite && extent > 0x1p-100f ? MOST_QUERY / extent : 0.0f);
        uint8_t* out = reinterpret_cast<uint8_t*>(s.query[lane]);
        Ints sum{};
        for (int at = 0; at < width; at += WIDTH) {
            const Ints number = whole(load(row + at) * factor), upper = (number + 64) >> 7;
            store_bytes(out + at, upper);
            store_bytes(out + MAX_HEAD_DIM + at, number - (upper << 7));
            sum += number;
        }
        s.offset[lane] = 128 * _mm512_reduce_add_epi32((__m512i)sum);
    }

    static __m512i four(const void* numbers, int index) {
        int32_t bits;
        std::memcpy(&bits, static_cast<const char*>(numbers) + 4 * index, sizeof bits);
        return _mm512_set1_epi32(bits);
    }

    template <int N, int FIXED>
    static void score(Scratch& s, int lane, const Strip& keys, int given) {
        const int width = FIXED ? FIXED : given;
        __m512i upper[N] = {}, lower[N] = {};
        for (int at = 0; at < width; at += LINE) {
            __m512i codes[TILE];
#pragma GCC unroll 16
            for (int key = 0; key < TILE; ++key) {
                if (at == 0) keys.fetch(key, width);
                codes[key] = _mm512_xor_si512(_mm512_loadu_si512(keys.row(key, width) + at), _mm512_set1_epi8(-128));
            }
            transpose(reinterpret_cast<Vec*>(codes));
#pragma GCC unroll 16
            for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    upper[n] = _mm512_dpbusd_epi32(upper[n], codes[i], four(part(s, lane + n, 0) + at, i));
                    lower[n] = _mm512_dpbusd_epi32(lower[n], codes[i], four(part(s, lane + n, 1) + at, i));
                }
        }
        for (int n = 0; n < N; ++n) {
            const Ints product = ((Ints)upper[n] << 7) + (Ints)lower[n] - s.offset[lane + n];
            store(s.scores[lane + n], to_floats(product) * keys.scale(0) * splat(s.step[lane + n]));
        }
    }

    // Probabilities times scales, by lanes, in two halves, as multiples of `step`.
    template <int N>
    struct Chances {
        alignas(16) uint8_t upper[N][TILE], lower[N][TILE];
        float step;

        Chances(Scratch& s, int lane, Vec scale) {
            const float extent = largest(scale);
            step = extent / MOST_CHANCE;
            const Vec factor = scale * splat(extent > 0 ? MOST_CHANCE / extent : 0.0f);
            for (int n = 0; n < N; ++n) {
                const Ints number = whole(load(s.chances[lane + n]) * factor);
                store_bytes(upper[n], number >> 8);
                store_bytes(lower[n], number);
                store(s.total[lane + n], fma(scale, Vec{}, load(s.total[lane + n])));  // a scale of NaN shows
            }
        }
    };

    // N lanes with LINE numbers of each value.
    template <int N>
    static BATCHGEN_INLINE void gather_line(Scratch& s, int lane, const Strip& values, const Chances<N>& chances, int at,
                                            int width) {
        __m512i upper[N][4] = {}, lower[N][4] = {};
#pragma GCC unroll 4
        for (int key = 0; key < TILE; key += 4) {
            __m512i row[4], half[4], codes[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(values.row(key + i, width) + at);
            half[0] = _mm512_unpacklo_epi8(row[0], row[1]), half[1] = _mm512_unpackhi_epi8(row[0], row[1]);
            half[2] = _mm512_unpacklo_epi8(row[2], row[3]), half[3] = _mm512_unpackhi_epi8(row[2], row[3]);
            codes[0] = _mm512_unpacklo_epi16(half[0], half[2]), codes[1] = _mm512_unpackhi_epi16(half[0], half[2]);
            codes[2] = _mm512_unpacklo_epi16(half[1], half[3]), codes[3] = _mm512_unpackhi_epi16(half[1], half[3]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const __m512i high = four(chances.upper[n], key / 4), low = four(chances.lower[n], key / 4);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    upper[n][i] = _mm512_dpbusd_epi32(upper[n][i], high, codes[i]);
                    lower[n][i] = _mm512_dpbusd_epi32(lower[n][i], low, codes[i]);
                }
            }
        }
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 4; ++i) {
                float* sum = s.output[lane + n] + at + i * WIDTH;
                const Vec product = to_floats(((Ints)upper[n][i] << 8) + (Ints)lower[n][i]);
                store(sum, fma(product, splat(chances.step), load(sum) * splat(s.correction[lane + n])));
            }
    }

    template <int N, int FIXED>
    static void gather(Scratch& s, int lane, const Strip& values, int given) {
        if constexpr (N > 3) {  // as many sums as there are registers
            gather<2, FIXED>(s, lane, values, given);
            gather<N - 2, FIXED>(s, lane + 2, values, given);
        } else {
            const int width = FIXED ? FIXED : given;
            const Chances<N> chances(s, lane, values.scale(0));
            for (int key = 0; key < TILE; ++key) values.fetch(key, width);
            for (int at = 0; at < width; at += LINE) gather_line<N>(s, lane, values, chances, at, width);
        }
    }

    // Vector i of a line holds numbers 4 i .. 4 i + 3 of every sixteen.
    static Vec result(const float* sums, int at) {
        const float* line = sums + at / LINE * LINE + at % LINE / 4;
        Vec out;
        for (int i = 0; i < 4; ++i) std::memcpy(reinterpret_cast<float*>(&out) + 4 * i, line + i * WIDTH, 4 * sizeof(float));
        return out;
    }
};

}  // namespace
}  // namespace batchgen
#endif
