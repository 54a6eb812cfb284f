"""Native CPU kernels: how C++ becomes a backend. Knows building, loading, instruction sets and threads; knows no op.

Every `.cpp` under kernels/ is compiled at install, once for each instruction set of setup.py, into plain shared
libraries beside this file: `portable.so`, `avx2.so`, `avx512.so`. They hold the same functions; `library.py` opens the
best one that the processor can run. They link against neither Python nor torch nor an OpenMP runtime.

To add a source: put `cpu.cpp` (any name) into the op's folder; setup.py finds it. In it

* include `../native/simd.h` for `Vec`, WIDTH floats of the set being compiled, and test `__AVX512VNNI__` and the like
  for instructions it lacks; never ask the processor, which library is loaded has been decided;
* run loops by `parallel` and `parallel_parts` of `../native/parallel.h`: on as many threads as
  `torch.set_num_threads` says, not all of which need come. No `#pragma omp`, which would need a runtime at link time;
* export by `BATCHGEN_EXPORT` of `../native/export.h`. What a forward pass consists of takes one structure that begins
  with the number of tokens, `void batchgen_NAME(const Call*)`; else pointers, int64_t and double;
* keep all else in `namespace batchgen`, helpers of one file in an unnamed one; no exceptions, no global state.

Then write `native.py` in the op's folder, which checks shapes, takes memory for its result from `empty` of `tape.py`
and makes the call by `run`, so that it can be recorded, and put it into `NativeKernels` of tables.py.
`pip install -e .` rebuilds; so does `python setup.py build_ext --inplace`.
"""
