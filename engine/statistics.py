"""What a run of the engine has done so far, for progress lines and reports. Counts only; decides nothing."""

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Counters of a run, and gauges of its last step."""

    arrived: int = 0  # sequences admitted
    steps: int = 0
    fed_tokens: int = 0
    computed_prompt_tokens: int = 0  # fed prompt tokens, recomputed ones included
    cached_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0  # fed as guesses
    accepted_tokens: int = 0  # of these, the ones that were right
    drafted_steps: int = 0
    forced_tokens: int = 0  # of these: known from a grammar, not drawn
    preemptions: int = 0
    copied_blocks: int = 0
    duplicates: int = 0
    host_wait_seconds: float = 0.0  # for the next row to be read, rendered and planned
    running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_peak: int = 0
    kv_blocks_total: int = 0
