// Penalties for tokens that a prompt or an answer holds; see the contract.
#include "../native/export.h"
#include "../native/parallel.h"

constexpr int64_t LEAST = 16384;  // entries that are worth waking a thread

// Sparse counts as Python lays them out; the fields stand in the same order in native.py.
struct Counts {
    const int64_t *rows, *tokens;
    const float* answer_counts;                       // of the entries
    const float *repetition, *presence, *frequency;  // of the rows

    float penalised(float x, int64_t entry) const {
        const int64_t row = rows[entry];
        const float count = answer_counts[entry];
        const float repeated = x > 0 ? x / repetition[row] : x * repetition[row];
        return repeated - ((count > 0 ? presence[row] : 0.0f) + frequency[row] * count);
    }
};

// In place. No two entries are the same token of a row.
BATCHGEN_EXPORT void batchgen_penalise(float* logits, int64_t stride, int64_t num_entries, const Counts* counts) {
    batchgen::parallel_parts(num_entries, LEAST, [&](int64_t begin, int64_t end) {
        for (int64_t entry = begin; entry < end; ++entry) {
            float& logit = logits[counts->rows[entry] * stride + counts->tokens[entry]];
            logit = counts->penalised(logit, entry);
        }
    });
}
