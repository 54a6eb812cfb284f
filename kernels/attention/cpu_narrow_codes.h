// Products of keys, or of values, with lanes where the rows are whole numbers of 8 bits: on the codes as they lie, in
// whole numbers that lose nothing. Queries and probabilities become 15 bits; those of queries lie in two parts.
#pragma once

#include "../native/sideways.h"
#include "../native/simd.h"
#include "cpu_narrow.h"
#include "cpu_narrow_chunks.h"

#if defined(__AVX512VNNI__)
namespace batchgen {
namespace {

// int8, for heads of whole cache lines of codes.
struct Codes {
    static constexpr int BYTES = 1, PARTS = 2;
    static constexpr float MOST_QUERY = 127 * 128, MOST_CHANCE = 32767;

    using Total = Ints;

    static bool take(int64_t format, int64_t width) { return format == KV_INT8 && width % LINE == 0; }

    // As whole numbers up to MOST_QUERY times a step, which is NaN where a number is not finite.
    static void keep_query(Scratch& s, int lane, const bfloat16* row, int width) {
        Ints most{};
        for (int at = 0; at < width; at += WIDTH) {
            const Ints size = (Ints)load(row + at) & 0x7fffffff;
            most = size > most ? size : most;
        }
        const int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
        float extent;
        std::memcpy(&extent, &bits, sizeof extent);
        const bool finite = bits < 0x7f800000;
        s.step[lane] = finite ? extent * (1 / MOST_QUERY) : NAN;
        const Vec factor = splat(finite && extent > 0x1p-100f ? MOST_QUERY / extent : 0.0f);
        char* out = reinterpret_cast<char*>(s.query[lane]);
        Ints sum{};
        for (int at = 0; at < width; at += LINE, out += QUADS * PARTS * LINE) {
            __m512i upper[4], lower[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const Ints number = whole(load(row + at + i * WIDTH) * factor), high = (number + 64) >> 7;
                upper[i] = (__m512i)high, lower[i] = (__m512i)(number - (high << 7));
                sum += number;
            }
            put_quads(out, pack_line(upper));
            put_quads(out + QUADS * LINE, pack_line(lower));
        }
        s.offset[lane] = 128 * _mm512_reduce_add_epi32((__m512i)sum);
    }

    // The lowest bytes of 64 whole numbers.
    static __m512i pack_line(const __m512i* numbers) {
        const __m512i low = _mm512_packs_epi32(numbers[0], numbers[1]), high = _mm512_packs_epi32(numbers[2], numbers[3]);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    }

    static __m512i read(const char* codes) {
        return _mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(-128));
    }

    static Ints start(const Scratch&, int) { return Ints{}; }

    // Adds what the upper parts give, raised, then what the lower give.
    static BATCHGEN_INLINE void add(Ints* fours, const __m512i (*codes)[QUADS], const char* query) {
        Ints sums[4] = {};
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; ++part) {
            if (part > 0)
#pragma GCC unroll 4
                for (int four = 0; four < 4; ++four) sums[four] = sums[four] << 7;
#pragma GCC unroll 4
            for (int i = 0; i < QUADS; ++i) {
                const __m512i numbers = _mm512_load_si512(query + (part * QUADS + i) * LINE);
#pragma GCC unroll 4
                for (int four = 0; four < 4; ++four)
                    sums[four] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[four], codes[four][i], numbers);
            }
        }
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) fours[four] += sums[four];
    }

    static Vec score(const Scratch& s, int lane, Ints total) {
        return to_floats(total - s.offset[lane]) * splat(s.step[lane]);
    }

    template <int N>
    static void put_chances(Scratch& s, int lane, const Rows* values, int strips, Chances<N>& chances) {
        Vec most{}, bad{};
        for (int strip = 0; strip < strips; ++strip) {
            most = larger(values[strip].scale(0), most);
            bad = fma(values[strip].scale(0), Vec{}, bad);  // a scale of NaN shows
        }
        const float extent = largest(most);
        chances.step = extent * (1 / MOST_CHANCE);
        const Vec factor = splat(extent > 0 ? MOST_CHANCE / extent : 0.0f);
        for (int strip = 0; strip < strips; ++strip) {
            const Vec factors = values[strip].scale(0) * factor;
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const Ints number = whole(load(s.chances[lane + n] + strip * STRIP) * factors);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(chances.numbers[n] + strip * STRIP),
                                    _mm512_cvtsepi32_epi16((__m512i)number));  // rounding may add to 1
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(s.total[lane + n], load(s.total[lane + n]) + bad);
    }

    static __m512i widen(const char* codes, int) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    }

    static Ints dot(Ints sum, __m512i values, __m512i chances) {
        return (Ints)_mm512_dpwssd_epi32((__m512i)sum, values, chances);
    }

    static Vec floats(Ints sum) { return to_floats(sum); }
};

}  // namespace
}  // namespace batchgen
#endif
