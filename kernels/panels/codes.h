// Four inputs of sixteen outputs as 8-bit codes, multiplied by four 8-bit activations and summed in whole numbers.
// Knows the bytes of a panel, see native.py, and the instructions for them.
#pragma once

#include "frame.h"

namespace batchgen {
namespace {

constexpr int QUAD_BYTES = 4 * OUTPUTS;  // four inputs of a panel, one byte each

struct Sums {
    Ints part[PARTS];
};

#if defined(__AVX512VNNI__)

struct Codes {
    __m512i bytes;
};
using Four = __m512i;

inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }

inline Four load_four(const int8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

// As the instruction itself: the compiler's intrinsic copies every sum to and fro.
inline void dot(Sums& sums, const Codes& codes, Four four) {
    Ints sum = sums.part[0];
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes.bytes), "v"(four));
    sums.part[0] = sum;
}

#elif defined(__AVX2__)

struct Codes {
    __m256i even[PARTS], odd[PARTS];  // inputs 0 and 2, 1 and 3 of every output, 16 bits each
};
struct Four {
    __m256i even, odd;
};

inline Codes load_codes(const uint8_t* p) {
    Codes codes;
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + part);
        codes.even[part] = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
        codes.odd[part] = _mm256_srli_epi16(bytes, 8);
    }
    return codes;
}

inline Four load_four(const int8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    const __m256i bytes = _mm256_set1_epi32(bits);
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

inline void dot(Sums& sums, const Codes& codes, const Four& four) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        const __m256i even = _mm256_madd_epi16(codes.even[part], four.even);
        const __m256i odd = _mm256_madd_epi16(codes.odd[part], four.odd);
        sums.part[part] += (Ints)even + (Ints)odd;
    }
}

#else

struct Codes {
    Ints part[PARTS];
};
struct Four {
    int32_t part[4];
};

inline Codes load_codes(const uint8_t* p) {
    Codes codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
}

inline Four load_four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }

inline void dot(Sums& sums, const Codes& codes, const Four& four) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part)
        for (int byte = 0; byte < 4; ++byte)
            sums.part[part] += ((codes.part[part] >> (8 * byte)) & 255) * four.part[byte];
}

#endif

// Two quads of nibbles as two quads of bytes.
inline void unpack(const uint8_t* packed, uint8_t* bytes) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        Words words;
        std::memcpy(&words, packed + part * sizeof words, sizeof words);
        const Words low = words & 0x0f0f0f0f, high = (words >> 4) & 0x0f0f0f0f;
        std::memcpy(bytes + part * sizeof words, &low, sizeof low);
        std::memcpy(bytes + QUAD_BYTES + part * sizeof words, &high, sizeof high);
    }
}

// The codes of two quads of nibbles.
inline void load_pair(const uint8_t* packed, Codes& low, Codes& high) {
#if defined(__AVX512VNNI__)
    const __m512i bytes = _mm512_loadu_si512(packed), mask = _mm512_set1_epi8(15);
    low.bytes = _mm512_and_si512(bytes, mask);
    high.bytes = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
#else
    uint8_t bytes[2 * QUAD_BYTES];
    unpack(packed, bytes);
    low = load_codes(bytes);
    high = load_codes(bytes + QUAD_BYTES);
#endif
}

}  // namespace
}  // namespace batchgen
