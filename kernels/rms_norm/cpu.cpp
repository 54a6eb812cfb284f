// RMS normalisation of rows; see the contract.
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

template <class T>
void norm_row(const T* x, const T* weight, float epsilon, int64_t width, T* out) {
    Vec squares[2] = {};
    int64_t at = 0;
    for (; at + 2 * WIDTH <= width; at += 2 * WIDTH) {
        const Vec a = load(x + at), b = load(x + at + WIDTH);
        squares[0] = fma(a, a, squares[0]), squares[1] = fma(b, b, squares[1]);
    }
    double total = 0;  // a row has one: exact costs nothing
    for (int lane = 0; lane < WIDTH; ++lane) total += double(squares[0][lane]) + double(squares[1][lane]);
    for (; at < width; ++at) total += double(to_float(x[at])) * to_float(x[at]);
    const Vec inverse = splat(float(1.0 / std::sqrt(total / double(width) + epsilon)));
    for (at = 0; at + WIDTH <= width; at += WIDTH)
        store(out + at, load(weight + at) * rounded<T>(load(x + at) * inverse));
    const int rest = int(width - at);
    if (rest) store_part(out + at, load_part(weight + at, rest) * rounded<T>(load_part(x + at, rest) * inverse), rest);
}

template <class T>
void norm(const T* x, const T* weight, T* out, int64_t outer, int64_t inner, int64_t width, int64_t outer_stride,
          int64_t inner_stride, float epsilon) {
    parallel_parts(outer, 16384 / (inner * width) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            for (int64_t j = 0; j < inner; ++j)
                norm_row(x + i * outer_stride + j * inner_stride, weight, epsilon, width, out + (i * inner + j) * width);
    });
}

}  // namespace
}  // namespace batchgen

// x [outer, inner, width] with strides in elements, out contiguous.
BATCHGEN_EXPORT void batchgen_rms_norm(const void* x, const void* weight, void* out, int64_t outer, int64_t inner,
                                       int64_t width, int64_t outer_stride, int64_t inner_stride, double epsilon,
                                       int64_t is_bfloat16) {
    using namespace batchgen;
    if (is_bfloat16)
        norm(static_cast<const bfloat16*>(x), static_cast<const bfloat16*>(weight), static_cast<bfloat16*>(out), outer,
             inner, width, outer_stride, inner_stride, float(epsilon));
    else
        norm(static_cast<const float*>(x), static_cast<const float*>(weight), static_cast<float*>(out), outer, inner,
             width, outer_stride, inner_stride, float(epsilon));
}
