// The gated activation; see the contract.
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

// e^-x to the precision that is left when it is rounded to T.
template <class T>
inline Vec exp_minus(Vec x);
template <>
inline Vec exp_minus<float>(Vec x) { return exp(-x); }
template <>
inline Vec exp_minus<bfloat16>(Vec x) {
    const Vec power = x * splat(-LOG2_E);
    return exp2<4>(power > splat(127.0f) ? splat(127.0f) : power);
}

template <class T>
inline Vec gated(Vec gate, Vec up) {
    return rounded<T>(gate / (splat(1.0f) + exp_minus<T>(gate))) * up;
}

template <class T>
void gate_row(const T* gate, const T* up, T* out, int64_t width) {
    int64_t at = 0;
    for (; at + WIDTH <= width; at += WIDTH) store(out + at, gated<T>(load(gate + at), load(up + at)));
    const int rest = int(width - at);
    if (rest) store_part(out + at, gated<T>(load_part(gate + at, rest), load_part(up + at, rest)), rest);
}

template <class T>
void swiglu(const T* x, T* out, int64_t rows, int64_t width, int64_t stride) {
    parallel_parts(rows, 8192 / width + 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            gate_row(x + row * stride, x + row * stride + width, out + row * width, width);
    });
}

}  // namespace
}  // namespace batchgen

// gate and up [rows, 2 * width] with a stride in elements, out [rows, width].
BATCHGEN_EXPORT void batchgen_swiglu(const void* x, void* out, int64_t rows, int64_t width, int64_t stride,
                                     int64_t is_bfloat16) {
    using namespace batchgen;
    if (is_bfloat16) swiglu(static_cast<const bfloat16*>(x), static_cast<bfloat16*>(out), rows, width, stride);
    else swiglu(static_cast<const float*>(x), static_cast<float*>(out), rows, width, stride);
}
