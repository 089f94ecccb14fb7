"""The `/metrics` page: the series of vLLM 0.32.0 that a watcher reads. Counts; decides nothing."""

from dataclasses import dataclass

_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Metrics:
    """Counts of the API server. They move only with outputs of the engine, so they freeze in a hang."""

    model: str
    running: int = 0
    waiting: int = 0
    steps: int = 0
    generation_tokens: int = 0
    prompt_tokens: int = 0
    finished_length: int = 0
    finished_abort: int = 0

    def page(self) -> str:
        """The whole page in the text format."""
        label = f'{{engine="0",model_name="{self.model}"}}'

        def reason(name: str, count: int) -> str:
            labels = f'engine="0",finished_reason="{name}",model_name="{self.model}"'
            return f"vllm:request_success_total{{{labels}}} {count}.0"

        buckets = [
            f'vllm:iteration_tokens_total_bucket{{engine="0",le="{edge}",model_name="{self.model}"}} {self.steps}.0'
            for edge in (*(f"{bucket}.0" for bucket in _BUCKETS), "+Inf")
        ]
        out = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{label} {self.running}.0",
            "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{label} {self.waiting}.0",
            "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.",
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{label} 0.0",
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total{label} {self.prompt_tokens}.0",
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{label} {self.generation_tokens}.0",
            "# HELP vllm:request_success_total Count of successfully processed requests.",
            "# TYPE vllm:request_success_total counter",
            reason("stop", 0),
            reason("length", self.finished_length),
            reason("abort", self.finished_abort),
            reason("error", 0),
            "# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.",
            "# TYPE vllm:iteration_tokens_total histogram",
            *buckets,
            f"vllm:iteration_tokens_total_count{label} {self.steps}.0",
            f"vllm:iteration_tokens_total_sum{label} {self.generation_tokens + self.prompt_tokens}.0",
            "# HELP vllm:engine_sleep_state Engine sleep state.",
            "# TYPE vllm:engine_sleep_state gauge",
            f'vllm:engine_sleep_state{{engine="0",model_name="{self.model}",sleep_state="awake"}} 1.0',
        ]
        return "\n".join(out) + "\n"
