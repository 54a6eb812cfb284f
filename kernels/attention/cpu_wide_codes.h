// Scores of the wide path where keys are whole numbers of 8 bits: their codes are multiplied as they lie, with queries
// rounded to 8 bits as well.
#pragma once

#include "../native/sideways.h"
#include "cpu_wide.h"

#if defined(__AVX512VNNI__)
namespace batchgen {
namespace {

struct Codes {
    using Product = Fours;

    // Whole numbers up to 127 times a unit of each query, which is NaN where a number is not finite.
    template <class Q>
    static void bring_queries(int first, int count, int width, Scratch& s, const void** rows) {
        const auto some = [&](int lane, int at) {
            const Q* row = static_cast<const Q*>(s.query_row[first + lane]) + at;
            return at + WIDTH <= width ? load(row) : load_part(row, width - at);
        };
        Ints sizes[WIDTH] = {};
        for (int lane = 0; lane < count; ++lane)
            for (int at = 0; at < width; at += WIDTH) {
                const Ints size = (Ints)some(lane, at) & 0x7fffffff;
                sizes[lane] = size > sizes[lane] ? size : sizes[lane];
            }
        const Ints most = largest_each(sizes);
        const Vec extent = (Vec)most;
        const Ints counts = (most < 0x7f800000) & (extent > splat(0x1p-100f));
        store(s.unit + first, counts ? extent * splat(1 / MOST) : most < 0x7f800000 ? splat(1.0f) : splat(NAN));
        float factors[WIDTH];
        store(factors, counts ? splat(MOST) / extent : Vec{});
        Ints sums[WIDTH] = {};
        for (int lane = 0; lane < count; ++lane) {
            rows[lane] = s.rows[lane];
            for (int at = 0; at < width; at += WIDTH) {
                const Ints number = whole(some(lane, at) * splat(factors[lane]));
                store_bytes(reinterpret_cast<uint8_t*>(s.rows[lane]) + at, number);
                sums[lane] += number;
            }
        }
        const Ints start = -RAISED * total_each(sums);
        std::memcpy(s.start + first, &start, sizeof start);
    }

    static void pack_keys(const Stored& keys, const int64_t* slots, int count, int width, Scratch& s) {
        const __m512i raise = _mm512_set1_epi8(-RAISED);  // the same as adding it
        for (int key = 0; key < count; ++key) {
            const char* codes = keys.codes + slots[key] * width;
            char* out = reinterpret_cast<char*>(s.keys + key * KEY_STRIDE<Fours>);
            int at = 0;
            for (; at + 64 <= width; at += 64)
                _mm512_store_si512(out + at, _mm512_xor_si512(_mm512_loadu_si512(codes + at), raise));
            for (; at < width; ++at) out[at] = char(codes[at] + RAISED);
            s.scales[key] = keys.scales[slots[key]];
        }
    }

    struct Ends : Ranked {
        const int32_t* starts;
        const float* scales;

        Ints start(const float*, int lane) const {
            Ints start;
            std::memcpy(&start, starts + lane, sizeof start);
            return start;
        }
        Vec result(Ints sum, int key) const { return to_floats(sum) * splat(scales[key]); }
    };

    static Ends ends(const Scratch& s, int lane, float* top) { return {{top}, s.start + lane, s.scales}; }

private:
    static constexpr float MOST = 127;
    static constexpr int RAISED = 128;  // added to codes: one side of these products has no sign
};

}  // namespace
}  // namespace batchgen
#endif
