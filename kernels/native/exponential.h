// Powers of two and of e, and tanh, of vectors: polynomials of the least degree that what reads them needs.
#pragma once

#include "simd.h"

namespace batchgen {

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

}  // namespace batchgen
