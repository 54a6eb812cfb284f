// What the process grants: the instruction sets of the processor and the threads of an OpenMP runtime given by address.
#include "export.h"
#include "parallel.h"

namespace batchgen {
namespace {

using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Count = int (*)();

Region region = nullptr;
Count most_threads = nullptr;

}  // namespace

int num_threads() { return most_threads ? most_threads() : 1; }

void run_on_threads(void (*body)(void*), void* data, int threads) { region(body, data, unsigned(threads), 0); }

}  // namespace batchgen

// The addresses of GOMP_parallel and omp_get_max_threads; without them everything runs on the calling thread.
BATCHGEN_EXPORT void batchgen_use_threads(void* parallel, void* max_threads) {
    batchgen::region = reinterpret_cast<batchgen::Region>(parallel);
    batchgen::most_threads = reinterpret_cast<batchgen::Count>(max_threads);
}

BATCHGEN_EXPORT int batchgen_num_threads() { return batchgen::num_threads(); }

// 2: AVX-512 with BF16 and VNNI, 1: AVX2 with FMA, 0: neither. Asks the processor and the operating system.
BATCHGEN_EXPORT int batchgen_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (wide) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
