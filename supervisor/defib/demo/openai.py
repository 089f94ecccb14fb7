"""OpenAI's bodies as vLLM 0.32.0 writes and refuses them. Values only; knows no connection."""

import secrets
import time
from dataclasses import dataclass, field

from defib.demo import tracebacks
from defib.demo.options import Options
from defib.demo.tokens import encode

FINGERPRINT = "vllm-0.32.0-8ebb4913"
COMPLETION_DEFAULT_TOKENS = 16
CHAT_DEFAULT_TOKENS = 64
ENGINE_DEAD = {
    "error": {
        "message": tracebacks.ENGINE_DEAD_TEXT,
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


class Refused(Exception):
    """The request is refused with a status and a body."""

    def __init__(self, status: int, message: str, kind: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Call:
    """A completion or chat request, understood."""

    chat: bool
    id: str
    model: str
    text: str
    prompt_ids: list[int]
    max_tokens: int
    finish_reason: str
    stream: bool
    include_usage: bool
    token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine_id(self) -> str:
        """The id in the engine: the response's id, the prompt's index (completions), a random suffix."""
        return f"{self.id}{'' if self.chat else '-0'}-{secrets.token_hex(4)}"


def understand(body: object, *, chat: bool, request_id: str | None, options: Options) -> Call:
    """Check a body as vLLM does. Raises Refused."""
    if not isinstance(body, dict):
        raise Refused(400, "1 validation error: body must be an object", "Bad Request", "body")
    model = body.get("model") or options.served_names[0]
    if model not in options.served_names:
        aliases = ", ".join(options.served_names)
        raise Refused(404, f"The model `{model}` does not exist. Valid aliases: {aliases}.", "NotFoundError", "model")
    text, ids = _chat_prompt(body) if chat else _prompt(body)
    asked = body.get("max_completion_tokens") or body.get("max_tokens") if chat else body.get("max_tokens")
    max_tokens = _max_tokens(asked, len(ids), chat, options)
    if body.get("n", 1) not in (1, None):
        raise Refused(400, "n must be 1 for the fake worker", "BadRequestError", "n")
    stream_options = body.get("stream_options") or {}
    name = str(request_id or body.get("request_id") or secrets.token_hex(8))
    return Call(
        chat=chat,
        id=f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        model=model,
        text=text,
        prompt_ids=ids,
        max_tokens=max_tokens,
        finish_reason="length" if asked is not None or not chat else "stop",
        stream=bool(body.get("stream")),
        include_usage=bool(isinstance(stream_options, dict) and stream_options.get("include_usage")),
        token_ids=bool(body.get("return_token_ids")),
    )


def _prompt(body: dict[str, object]) -> tuple[str, list[int]]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return "", [int(token) for token in prompt]
    if isinstance(prompt, list) and prompt:
        raise Refused(400, "one prompt a request for the fake worker", "BadRequestError", "prompt")
    raise Refused(
        400,
        "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
        "BadRequestError",
        "prompt",
    )


def _chat_prompt(body: dict[str, object]) -> tuple[str, list[int]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused(400, "1 validation error: messages: Field required", "Bad Request", "body.messages")
    text = ""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        text += f"<|im_start|>{message.get('role')}\n{content or ''}<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    return text, encode(text)


def _max_tokens(asked: object, prompt_tokens: int, chat: bool, options: Options) -> int:
    longest = options.max_model_len
    if asked is None:
        default = CHAT_DEFAULT_TOKENS if chat else COMPLETION_DEFAULT_TOKENS
        asked = min(default, longest - prompt_tokens)
    if not isinstance(asked, int):
        raise Refused(400, "max_tokens must be an integer", "BadRequestError", "max_tokens")
    if prompt_tokens >= longest:
        raise Refused(
            400,
            f"This model's maximum context length is {longest} tokens. However, your request has "
            f"{prompt_tokens} input tokens. Please reduce the length of the input messages.",
            "BadRequestError",
            "input_tokens",
        )
    if asked < 1:
        text = f"max_tokens must be at least 1, got {asked}. (parameter=max_tokens, value={asked})"
        raise Refused(400, text, "BadRequestError", "max_tokens")
    if asked > longest:
        text = (
            f"max_tokens={asked} cannot be greater than max_model_len={longest}. Please request fewer "
            f"output tokens. (parameter=max_tokens, value={asked})"
        )
        raise Refused(400, text, "BadRequestError", "max_tokens")
    return min(asked, longest - prompt_tokens)


def usage(call: Call, made: int) -> dict[str, object]:
    """The usage object."""
    prompt = len(call.prompt_ids)
    return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}


def whole(call: Call, text: str, ids: list[int]) -> dict[str, object]:
    """The body of a plain answer."""
    choice: dict[str, object] = {"index": 0}
    if call.chat:
        choice["message"] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
    else:
        choice["text"] = text
    choice |= {
        "logprobs": None,
        "finish_reason": call.finish_reason,
        "stop_reason": None,
        "token_ids": ids if call.token_ids else None,
    }
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {
        "id": call.id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(call, len(ids)) | details,
        "prompt_token_ids": call.prompt_ids if call.token_ids else None,
        "kv_transfer_params": None,
    }


def role_chunk(call: Call) -> dict[str, object]:
    """What a chat stream sends before its first token, in the same moment."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    ids = call.prompt_ids if call.token_ids else None
    return _chunk(call, [choice]) | {"prompt_token_ids": ids, "prompt_text": None}


def token_chunk(call: Call, text: str, token: int, index: int) -> dict[str, object]:
    """The chunk of one token; `index` from 0."""
    last = index + 1 == call.max_tokens
    choice: dict[str, object] = {"index": 0}
    choice |= {"delta": {"content": text}} if call.chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": call.finish_reason if last else None}
    if not call.chat:
        choice["stop_reason"] = None
        choice["prompt_token_ids"] = call.prompt_ids if call.token_ids and index == 0 else None
    elif last:
        choice["stop_reason"] = None
    choice["token_ids"] = [token] if call.token_ids else None
    chunk = _chunk(call, [choice])
    return chunk | {"system_fingerprint": FINGERPRINT} if last and not call.include_usage else chunk


def usage_chunk(call: Call, made: int) -> dict[str, object]:
    """The last chunk where `stream_options.include_usage` asks for it."""
    return _chunk(call, []) | {"usage": usage(call, made), "system_fingerprint": FINGERPRINT}


def _chunk(call: Call, choices: list[dict[str, object]]) -> dict[str, object]:
    return {
        "id": call.id,
        "object": "chat.completion.chunk" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }


def models(options: Options) -> dict[str, object]:
    """The body of `/v1/models`."""
    created = int(time.time())
    data: list[dict[str, object]] = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
            "permission": [],
        }
        for name in options.served_names
    ]
    return {"object": "list", "data": data}
