"""Makes the tiny model of the engine tests: a Qwen2 of two layers, dummy weights, its own tokenizer.

Runs with the Python of the vLLM environment (needs `tokenizers`): `python model.py FOLDER`.
Nothing is downloaded: the tokenizer is trained on a text that is written here, so every run gives
the same one, and `--load-format dummy` makes the weights from a fixed seed.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fault|>", "<|hang|>"]
VOCABULARY = 1000
TEXT = [
    "The supervisor reads what the worker writes, and waits for two witnesses.",
    "A context that is poisoned stays poisoned until its process has gone.",
    "Seven requests were in flight when the kernel wrote past the end of its buffer.",
    "Evidence first, then the kill, then the caches, then a start that is proven by a canary.",
    "What had delivered nothing is sent again; what was half delivered ends with a clear error.",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["FaultyQwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


def make(folder: Path) -> None:
    """Write config, tokenizer and generation config into `folder` (made if missing)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    # As large as the tokenizer's: an id without text would make answers look empty.
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, value in {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
    }.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


if __name__ == "__main__":
    make(Path(sys.argv[1]))
