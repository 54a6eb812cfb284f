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

// exp2 with a polynomial of the given degree (4: 4e-6, 6: 1e-8 relative). NaN stays NaN, below 2^-126 becomes zero.
template <int DEGREE>
inline Vec exp2(Vec x) {
    static_assert(DEGREE == 4 || DEGREE == 6);
    x = larger(splat(-200.0f), x);
#if defined(__AVX512F__)
    const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec shifter = splat(12582912.0f);
    const Vec shifted = x + shifter;
    const Vec whole = shifted - shifter;
#endif
    const Vec f = x - whole;
    Vec p;
    if constexpr (DEGREE == 6) {
        p = fma(splat(1.535336188319500e-4f), f, splat(1.339887440266574e-3f));
        p = fma(p, f, splat(9.618437357674640e-3f));
        p = fma(p, f, splat(5.550332471162809e-2f));
        p = fma(p, f, splat(2.402264791363012e-1f));
        p = fma(p, f, splat(6.931472028550421e-1f));
    } else {
        p = fma(splat(9.570150e-3f), f, splat(5.590785e-2f));
        p = fma(p, f, splat(2.402461e-1f));
        p = fma(p, f, splat(6.931222e-1f));
    }
    p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, whole);
#else
    const Vec scaled = (Vec)((Words)p + ((Words)shifted << 23));
    return x < splat(-126.0f) ? Vec{} : scaled;
#endif
}

#if defined(__AVX512F__)
// exp2 to 1.1e-4 relative, for results that are rounded to bfloat16: a polynomial between whole numbers, where it meets
// their powers. NaN stays NaN.
inline Vec exp2_rough(Vec x) {
    const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x), and 0 at -infinity
    Vec p = fma(splat(7.826797e-2f), f, splat(2.2630768e-1f));
    p = fma(p, f, splat(6.9542435e-1f));
    p = fma(p, f, splat(1.0f));
    return _mm512_scalef_ps(p, x);
}
#endif

constexpr float LOG2_E = 1.44269504088896340736f;

// e^x to two units in the last place: the argument is reduced with ln 2 in two parts.
inline Vec exp(Vec x) {
    const Vec clipped = larger(splat(-104.0f), x);
    const Vec inside = clipped > splat(89.0f) ? splat(89.0f) : clipped;
    const Vec shifter = splat(12582912.0f);
    const Vec shifted = fma(inside, splat(LOG2_E), shifter);
    const Vec whole = shifted - shifter;
    Vec f = fma(whole, splat(-0.693359375f), inside);
    f = fma(whole, splat(2.12194440e-4f), f);
    Vec p = fma(splat(1.9875691500e-4f), f, splat(1.3981999507e-3f));
    p = fma(p, f, splat(8.3334519073e-3f));
    p = fma(p, f, splat(4.1665795894e-2f));
    p = fma(p, f, splat(1.6666665459e-1f));
    p = fma(p, f, splat(5.0000001201e-1f));
    p = fma(p, f * f, f) + splat(1.0f);
    // 2^whole in two factors, so that neither overflows nor underflows before the product does
    const Ints steps = (Ints)shifted - (Ints)shifter;
    const Ints first = steps >> 1, second = steps - first;
    return p * (Vec)((first + 127) << 23) * (Vec)((second + 127) << 23);
}

inline Vec tanh(Vec x) {
    const Vec size = x < Vec{} ? -x : x;
    const Vec big = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
    const Vec square = x * x;
    Vec p = fma(splat(-5.70498872745e-3f), square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    const Vec small = fma(p * square, x, x);
    return size < splat(0.625f) ? small : (x < Vec{} ? -big : big);
}

template <int H, size_t... LANE>
inline Vec shuffle_low(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, (LANE & H ? WIDTH + LANE - H : LANE)...);
}

template <int H, size_t... LANE>
inline Vec shuffle_high(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, (LANE & H ? WIDTH + LANE : LANE + H)...);
}

// Blocks of H lanes: the lower ones of a and b side by side, and the upper ones.
template <int H>
inline Vec shuffle_low(Vec a, Vec b) {
    return shuffle_low<H>(a, b, std::make_index_sequence<WIDTH>());
}

template <int H>
inline Vec shuffle_high(Vec a, Vec b) {
    return shuffle_high<H>(a, b, std::make_index_sequence<WIDTH>());
}

template <int H = WIDTH / 2>
inline float sum(Vec v) {
    if constexpr (H > 0) return sum<H / 2>(v + shuffle_high<H>(v, v));
    return v[0];
}

template <int H = WIDTH / 2>
inline float largest(Vec v) {
    if constexpr (H > 0) return largest<H / 2>(larger(v, shuffle_high<H>(v, v)));
    return v[0];
}

template <int H = WIDTH / 2>
inline int32_t largest(Ints v) {
    if constexpr (H > 0) {
        const Ints other = (Ints)shuffle_high<H>((Vec)v, (Vec)v);
        return largest<H / 2>(other > v ? other : v);
    }
    return v[0];
}

// rows[i][j] becomes rows[j][i].
template <int H = WIDTH / 2>
inline void transpose(Vec* rows) {
    if constexpr (H > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) {
            if (i & H) continue;
            const Vec a = rows[i], b = rows[i + H];
            rows[i] = shuffle_low<H>(a, b);
            rows[i + H] = shuffle_high<H>(a, b);
        }
        transpose<H / 2>(rows);
    }
}

// Lane i of the result is what `join` makes of the lanes of rows[i].
template <int H = WIDTH / 2, class Rows, class Join>
inline Rows reduce_each(Rows* rows, const Join& join) {
    if constexpr (H > 0) {
#pragma GCC unroll 8
        for (int i = 0; i < H; ++i) {
            const Vec a = (Vec)rows[i], b = (Vec)rows[i + H];
            rows[i] = join((Rows)shuffle_low<H>(a, b), (Rows)shuffle_high<H>(a, b));
        }
        return reduce_each<H / 2>(rows, join);
    } else {
        return rows[0];
    }
}

inline Vec sum_each(Vec* rows) {
    return reduce_each(rows, [](Vec a, Vec b) { return a + b; });
}

inline Vec largest_each(Vec* rows) {
    return reduce_each(rows, [](Vec a, Vec b) { return larger(a, b); });
}

inline Ints total_each(Ints* rows) {
    return reduce_each(rows, [](Ints a, Ints b) { return a + b; });
}

inline Ints largest_each(Ints* rows) {
    return reduce_each(rows, [](Ints a, Ints b) { return a > b ? a : b; });
}

}  // namespace batchgen
