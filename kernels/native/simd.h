// One vector of floats of the widest kind this file is compiled for, and what the kernels do with it.
// Knows instruction sets; knows no op. AVX-512 has its own code where it pays, the rest is GCC's vector arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// For functions whose arguments are constants at every call.
#define BATCHGEN_INLINE inline __attribute__((always_inline))

namespace batchgen {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

struct bfloat16 {
    uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec widen(Halves h) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    return (Vec)(__builtin_convertvector(h, Words) << 16);
#endif
}

// WIDTH bytes as whole numbers.
inline Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    Ints v;
    for (int lane = 0; lane < WIDTH; ++lane) v[lane] = p[lane];
    return v;
#endif
}

inline Ints load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    Ints v;
    for (int lane = 0; lane < WIDTH; ++lane) v[lane] = p[lane];
    return v;
#endif
}

// The lowest bytes of whole numbers.
inline void store_bytes(uint8_t* p, Ints v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    const Bytes bytes = __builtin_convertvector(v, Bytes);
    std::memcpy(p, &bytes, sizeof bytes);
#endif
}

// The same of several vectors; with four of them the numbers are -128 .. 127.
template <int COUNT>
inline void store_bytes(uint8_t* p, const Ints (&v)[COUNT]) {
#if defined(__AVX512F__)
    if constexpr (COUNT == 4) {
        const __m512i low = _mm512_packs_epi32((__m512i)v[0], (__m512i)v[1]);
        const __m512i high = _mm512_packs_epi32((__m512i)v[2], (__m512i)v[3]);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
        return;
    }
#endif
    for (int i = 0; i < COUNT; ++i) store_bytes(p + i * WIDTH, v[i]);
}

// The nearest whole number, ties to even; |x| is below 2^22.
inline Ints whole(Vec x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32(x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32(x);
#else
    const Vec shifter = splat(12582912.0f);
    return (Ints)(x + shifter) - (Ints)shifter;
#endif
}

// Of lanes that are all ones or zero: one is not.
inline bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
    const Ints zero{};
    return std::memcmp(&mask, &zero, sizeof mask) != 0;
#endif
}

// 0, 1, 2, ..
inline Ints from_zero() {
    Ints lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane;
    return lanes;
}

inline Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }

inline Vec load(const bfloat16* p) {
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return widen(h);
}

// Rounds to the nearest bfloat16, ties to even, as torch does; NaN stays NaN. (The instruction takes numbers below
// 2^-126 for zero.)
inline Halves narrow(Vec v) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh(v);
#else
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = Words{} + 0x7fc0;
    return __builtin_convertvector(v == v ? rounded : quiet, Halves);
#endif
}

inline void store(bfloat16* p, Vec v) {
    const Halves h = narrow(v);
    std::memcpy(p, &h, sizeof h);
}

// The first n < WIDTH elements; the others are zero, and memory behind n is not touched.
template <class T>
inline Vec load_part(const T* p, int n) {
    T part[WIDTH] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}

template <class T>
inline void store_part(T* p, Vec v, int n) {
    T part[WIDTH];
    store(part, v);
    std::memcpy(p, part, n * sizeof(T));
}

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// What x is after being stored as T: the place where low precision rounds.
template <class T>
inline Vec rounded(Vec x);
template <>
inline Vec rounded<float>(Vec x) { return x; }
template <>
inline Vec rounded<bfloat16>(Vec x) { return widen(narrow(x)); }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// The larger of both; y where either is NaN.
inline Vec larger(Vec x, Vec y) {
#if defined(__AVX512F__)
    return _mm512_max_ps(x, y);
#elif defined(__AVX2__)
    return _mm256_max_ps(x, y);
#else
    return x > y ? x : y;
#endif
}

inline Vec square_root(Vec x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
    return _mm256_sqrt_ps(x);
#else
    for (int lane = 0; lane < WIDTH; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
#endif
}

}  // namespace batchgen
