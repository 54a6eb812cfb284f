// Keys or values of the fed tokens into their slots; see the contract.
#include <type_traits>

#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

template <class S, class T>
void put_row(const S* from, T* to, int64_t width) {
    if constexpr (std::is_same_v<S, T>) {
        std::memcpy(to, from, width * sizeof(T));
    } else {
        int64_t at = 0;
        for (; at + WIDTH <= width; at += WIDTH) store(to + at, load(from + at));
        if (at < width) store_part(to + at, load_part(from + at, int(width - at)), int(width - at));
    }
}

template <class S, class T>
void put(const void* source, const int64_t* slots, void* pages, int64_t tokens, int64_t heads, int64_t width,
         int64_t stride, int64_t head_stride, int64_t page_head_stride) {
    const S* from = static_cast<const S*>(source);
    T* to = static_cast<T*>(pages);
    parallel_parts(tokens, 16384 / (heads * width) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t head = 0; head < heads; ++head)
                put_row(from + t * stride + head * head_stride, to + head * page_head_stride + slots[t] * width, width);
    });
}

}  // namespace
}  // namespace batchgen

// source [tokens, heads, width] with strides in elements, pages [heads, slots, width].
BATCHGEN_EXPORT void batchgen_write_kv(const void* source, const int64_t* slots, void* pages, int64_t tokens,
                                       int64_t heads, int64_t width, int64_t stride, int64_t head_stride,
                                       int64_t page_head_stride, int64_t source_bfloat16, int64_t pages_bfloat16) {
    using namespace batchgen;
    const auto run = source_bfloat16 ? (pages_bfloat16 ? put<bfloat16, bfloat16> : put<bfloat16, float>)
                                     : (pages_bfloat16 ? put<float, bfloat16> : put<float, float>);
    run(source, slots, pages, tokens, heads, width, stride, head_stride, page_head_stride);
}
