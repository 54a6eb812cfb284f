// Forbidden tokens; see the contract.
#include <cmath>

#include "../native/export.h"
#include "../native/parallel.h"

namespace batchgen {
namespace {

// Words of a mask are mostly all zeros or all ones, so whole words are looked at first.
void mask_row(float* row, int64_t vocabulary, const uint32_t* bits, int64_t words) {
    for (int64_t word = 0; word * 32 < vocabulary; ++word) {
        const uint32_t allowed = word < words ? bits[word] : 0;
        if (allowed == 0xffffffffu) continue;
        float* first = row + word * 32;
        const int count = int(vocabulary - word * 32 < 32 ? vocabulary - word * 32 : 32);
        for (int bit = 0; bit < count; ++bit) first[bit] = allowed >> bit & 1u ? first[bit] : -INFINITY;
    }
}

}  // namespace
}  // namespace batchgen

// rows [num_rows], bits [num_rows, words].
BATCHGEN_EXPORT void batchgen_mask(float* logits, int64_t stride, int64_t vocabulary, const int64_t* rows,
                                   int64_t num_rows, const uint32_t* bits, int64_t words) {
    batchgen::parallel_parts(num_rows, 65536 / vocabulary, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at)
            batchgen::mask_row(logits + rows[at] * stride, vocabulary, bits + at * words, words);
    });
}
