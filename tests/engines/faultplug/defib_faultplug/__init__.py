"""For tests only: a vLLM plugin whose model class fails on request. Never install it beside a real service.

vLLM loads plugins in the API server, the EngineCore and each worker, so the model class is
registered by name and imported only where the model is built. It must not import torch here.
"""

MODEL_CLASS = "FaultyQwen2ForCausalLM"


def register() -> None:
    """Called by vLLM (entry point group `vllm.general_plugins`) once in each of its processes."""
    from vllm import ModelRegistry

    if MODEL_CLASS not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(MODEL_CLASS, f"defib_faultplug.model:{MODEL_CLASS}")
