// RMS normalisation of rows; see the contract.
#include <algorithm>

#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

constexpr int CHAINS = 4;  // of sums that do not wait for one another

// What a row is made of: itself.
template <class T>
struct Row {
    const T* x;

    Vec take(int64_t at) const { return load(x + at); }
    Vec take_part(int64_t at, int count) const { return load_part(x + at, count); }
};

// A residual that x is added to.
template <class T>
struct SumRow {
    T* x;
    const T* added;

    Vec take(int64_t at) const {
        const Vec sum = rounded<T>(load(x + at) + load(added + at));
        store(x + at, sum);
        return sum;
    }
    Vec take_part(int64_t at, int count) const {
        const Vec sum = rounded<T>(load_part(x + at, count) + load_part(added + at, count));
        store_part(x + at, sum, count);
        return sum;
    }
};

template <class T, class Source>
void norm_row(const Source& row, const T* weight, float epsilon, int64_t width, T* out) {
    Vec squares[CHAINS] = {};
    int64_t at = 0;
    for (; at + CHAINS * WIDTH <= width; at += CHAINS * WIDTH)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; ++chain) {
            const Vec v = row.take(at + chain * WIDTH);
            squares[chain] = fma(v, v, squares[chain]);
        }
    double total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; at < width; at += WIDTH) {
        const Vec v = row.take_part(at, int(std::min<int64_t>(width - at, WIDTH)));
        for (int lane = 0; lane < WIDTH; ++lane) total += double(v[lane]) * v[lane];
    }
    const Vec inverse = splat(float(1.0 / std::sqrt(total / double(width) + epsilon)));
    const T* x = row.x;
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
                norm_row(Row<T>{x + i * outer_stride + j * inner_stride}, weight, epsilon, width,
                         out + (i * inner + j) * width);
    });
}

template <class T>
void add_norm(T* residual, const T* x, const T* weight, T* out, int64_t rows, int64_t width, int64_t stride,
              float epsilon) {
    parallel_parts(rows, 16384 / width + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            norm_row(SumRow<T>{residual + i * width, x + i * stride}, weight, epsilon, width, out + i * width);
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

// residual and out [rows, width] contiguous, x with a stride in elements.
BATCHGEN_EXPORT void batchgen_add_rms_norm(void* residual, const void* x, const void* weight, void* out, int64_t rows,
                                           int64_t width, int64_t stride, double epsilon, int64_t is_bfloat16) {
    using namespace batchgen;
    if (is_bfloat16)
        add_norm(static_cast<bfloat16*>(residual), static_cast<const bfloat16*>(x),
                 static_cast<const bfloat16*>(weight), static_cast<bfloat16*>(out), rows, width, stride,
                 float(epsilon));
    else
        add_norm(static_cast<float*>(residual), static_cast<const float*>(x), static_cast<const float*>(weight),
                 static_cast<float*>(out), rows, width, stride, float(epsilon));
}
