// Vectors of the KV formats made into numbers; see the contract. Knows rows, not pages or heads.
#pragma once

#include <cstdint>

#include "../native/hadamard.h"

namespace batchgen {

constexpr int MAX_HEAD_DIM = 512;
constexpr int KV_GROUP = 64;
enum KVFormat : int64_t { KV_FLOAT32, KV_BFLOAT16, KV_FP8, KV_INT8, KV_INT4 };  // as KVFormat.number

// A row of codes and its scales as numbers of type O. `width` is D; nothing behind the row is read or written.
struct ReadInt8 {
    static Vec numbers(const char* codes) { return to_floats(load_bytes(reinterpret_cast<const int8_t*>(codes))); }
    static Vec factor(const float* scales) { return splat(scales[0]); }
};

struct ReadFloat8 {
#if defined(__AVX512F__)
    // Shifted, the bits are those of a half 2^8 times as small; subnormal ones too.
    static Vec numbers(const char* codes) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
        const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
        return _mm512_cvtph_ps(_mm256_or_si256(sign, size));
    }
    static Vec factor(const float* scales) { return splat(scales[0] * 256.0f); }
#else
    static Vec numbers(const char* codes) {
        const Words wide = (Words)load_bytes(reinterpret_cast<const uint8_t*>(codes));
        const Words size = (wide & 0x7f) << 20, sign = (wide & 0x80) << 24;
        const Vec normal = (Vec)(size + (120u << 23));
        const Vec subnormal = (Vec)(size + (121u << 23)) - splat(0.015625f);
        return (Vec)((Words)(size < (1u << 23) ? subnormal : normal) | sign);
    }
    static Vec factor(const float* scales) { return splat(scales[0]); }
#endif
};

template <class Format>
struct ReadScaled {
    template <class O>
    static BATCHGEN_INLINE void row(const char* codes, const float* scales, int width, O* out) {
        const Vec factor = Format::factor(scales);
        int at = 0;
#pragma GCC unroll 8
        for (; at + WIDTH <= width; at += WIDTH) store(out + at, Format::numbers(codes + at) * factor);
        if (at == width) return;
        char rest[WIDTH] = {};
        std::memcpy(rest, codes + at, width - at);
        store_part(out + at, Format::numbers(rest) * factor, width - at);
    }
};

#if defined(__AVX512BF16__)
// As they are, without a scale: bfloat16 holds every one of them. What is subnormal is looked up.
struct Float8Pairs {
    static constexpr int STEP = 2 * WIDTH;

    static __m512i numbers(const char* codes) {
        const __m512i subnormals = _mm512_set1_epi64(0x3bc03b803b000000), upper = _mm512_set1_epi64(0x3c603c403c203c00);
        const __m512i table = _mm512_unpacklo_epi64(subnormals, upper);  // by the three bits behind the exponent
        const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
        const __m512i size = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f)), 4);
        const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
        const __mmask32 small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
        return _mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, small, wide, table), sign);
    }

    // The scale is 1: it is multiplied later. `width` is a number of whole vectors.
    static BATCHGEN_INLINE void row(const char* codes, const float*, int width, bfloat16* out) {
#pragma GCC unroll 4
        for (int at = 0; at < width; at += STEP) _mm512_storeu_si512(out + at, numbers(codes + at));
    }
};
#endif

struct ReadInt4 {
    template <class O>
    static BATCHGEN_INLINE void row(const char* codes, const float* scales, int width, O* out) {
        const int half = (width + 1) / 2, groups = (width + KV_GROUP - 1) / KV_GROUP;
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes);
        const auto number = [&](Ints steps, int element) {
            const int group = element / KV_GROUP;
            return fma(to_floats(steps), splat(scales[group]), splat(scales[groups + group]));
        };
        if (width % (2 * WIDTH) == 0) {  // no vector reaches into two groups
#pragma GCC unroll 4
            for (int at = 0; at < half; at += WIDTH) {
                const Ints wide = load_bytes(bytes + at);
                store(out + at, number(wide & 15, at));
                store(out + half + at, number(wide >> 4, half + at));
            }
            return;
        }
        for (int element = 0; element < width; ++element) {
            const int32_t byte = bytes[element < half ? element : element - half];
            const Vec one = number(Ints{} + (element < half ? byte & 15 : byte >> 4), element);
            store_part(out + element, one, 1);
        }
    }
};

template <class T>
struct ReadPlain {
    template <class O>
    static BATCHGEN_INLINE void row(const char* codes, const float*, int width, O* out) {
        const T* from = reinterpret_cast<const T*>(codes);
        int at = 0;
        for (; at + WIDTH <= width; at += WIDTH) store(out + at, load(from + at));
        if (at < width) store_part(out + at, load_part(from + at, width - at), width - at);
    }
};

}  // namespace batchgen
