// Memory that a thread keeps from call to call. Knows sizes, not what they are for.
#pragma once

#include <cstdint>
#include <memory>

namespace batchgen {

constexpr int CACHE_LINE = 64;

// At least `bytes`, at the start of a cache line; the contents are what the last user of this Purpose left.
template <class Purpose>
char* room(int64_t bytes) {
    static thread_local std::unique_ptr<char[]> mine;
    static thread_local int64_t size = 0;
    if (bytes > size) mine.reset(new char[(size = bytes) + CACHE_LINE]);
    return mine.get() + (CACHE_LINE - reinterpret_cast<uintptr_t>(mine.get()) % CACHE_LINE);
}

}  // namespace batchgen
