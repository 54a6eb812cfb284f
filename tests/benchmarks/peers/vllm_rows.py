"""Runs rows through vLLM's offline engine; for an interpreter that has vLLM for CPUs."""

import os
import sys
import time

from protocol import read_call, warm_prompts, write_result

CORES = sorted(os.sched_getaffinity(0))
BATCH, STEP_TOKENS = 256, 4096


def main() -> None:
    rows, options = read_call(sys.argv)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CORES)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams, __version__

    longest = max(len(row["tokens"]) + row["max_tokens"] for row in rows)
    llm = LLM(
        options["model"],
        skip_tokenizer_init=True,
        dtype=options["dtype"],
        max_model_len=max(2048, -(-longest // 1024) * 1024),
        max_num_seqs=BATCH,
        max_num_batched_tokens=STEP_TOKENS,
        disable_log_stats=False,
        seed=0,
    )
    warm = [{"prompt_token_ids": tokens} for tokens in warm_prompts()]
    quiet = {"use_tqdm": False}
    llm.generate(warm, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False), **quiet)
    llm.reset_prefix_cache()
    sampling = [
        SamplingParams(
            n=row["n"],
            temperature=row["temperature"],
            max_tokens=row["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        for row in rows
    ]

    def computed() -> int:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return values["vllm:prefix_cache_queries"] - values["vllm:prefix_cache_hits"]

    before, start = computed(), time.time()
    outputs = llm.generate([{"prompt_token_ids": row["tokens"]} for row in rows], sampling, **quiet)
    end = time.time()
    write_result(
        start=start,
        first=end,
        end=end,
        computed_prompt_tokens=computed() - before,
        answers=[[list(answer.token_ids) for answer in output.outputs] for output in outputs],
        version=__version__,
    )


if __name__ == "__main__":
    main()
