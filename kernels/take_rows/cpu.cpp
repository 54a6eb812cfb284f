// Rows of a table; see the contract.
#include <cstring>

#include "../native/export.h"
#include "../native/parallel.h"

namespace batchgen {
namespace {

constexpr int64_t LEAST_BYTES = 1 << 15;  // that a thread copies

// As Python lays it out; the fields stand in the same order in native.py.
struct Call {
    int64_t tokens;
    const char* table;
    const int64_t* index;
    char* out;
    int64_t row_bytes;
};

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_take_rows(const batchgen::Call* call) {
    using namespace batchgen;
    const int64_t bytes = call->row_bytes;
    parallel_parts(call->tokens, LEAST_BYTES / (bytes + 1) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            std::memcpy(call->out + token * bytes, call->table + call->index[token] * bytes, bytes);
    });
}
