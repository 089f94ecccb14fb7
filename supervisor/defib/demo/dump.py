"""The dump of the failing batch, as vLLM prints it: which requests ran, with lengths and no text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """A request of the batch: engine id, prompt length, tokens made, tokens asked for."""

    id: str
    prompt_tokens: int
    made: int
    max_tokens: int


def scheduler_output(runs: list[Run]) -> str:
    """`SchedulerOutput(...)`: requests in their first step are new, the others cached."""
    new = ", ".join(_new_request(run) for run in runs if run.made == 0)
    cached = [run for run in runs if run.made > 0]
    computed = [run.prompt_tokens + run.made - 1 for run in cached]
    counts = {run.id: 1 if run.made else run.prompt_tokens for run in runs}
    shares = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return (
        f"SchedulerOutput(scheduled_new_reqs=[{new}], scheduled_cached_reqs=CachedRequestData("
        f"req_ids={[run.id for run in cached]!r},resumed_req_ids=set(),new_token_ids_lens=[],"
        f"all_token_ids_lens={{}},new_block_ids={[None] * len(cached)!r},num_computed_tokens={computed!r},"
        f"num_output_tokens={[run.made for run in cached]!r}), num_scheduled_tokens={{{shares}}}, "
        f"total_num_scheduled_tokens={sum(counts.values())}, scheduled_spec_decode_tokens={{}}, "
        "scheduled_encoder_inputs={}, finished_req_ids=[], free_encoder_mm_hashes=[], "
        "preempted_req_ids=[], has_structured_output_requests=false, kv_connector_metadata=null, "
        "num_common_prefix_blocks=[])"
    )


def _new_request(run: Run) -> str:
    return (
        f"NewRequestData(req_id={run.id},prompt_token_ids_len={run.prompt_tokens},"
        f"sampling_params=SamplingParams(n=1, temperature=0.0, max_tokens={run.max_tokens}),"
        "block_ids=([1],),num_computed_tokens=0,lora_request=None)"
    )


def scheduler_stats(running: int, waiting: int) -> str:
    """`SchedulerStats(...)`."""
    return (
        f"SchedulerStats(num_running_reqs={running}, num_waiting_reqs={waiting}, num_skipped_waiting_reqs=0, "
        "step_counter=0, current_wave=0, kv_cache_usage=0.0001831166453030164, spec_decoding_stats=None)"
    )
