"""The API server's requests: routes, exchanges, and what each gets when the engine dies.

Owns the connection to EngineCore. What ends the process is decided in `fakeworker.py`.
"""

import asyncio
import json
import queue
import secrets
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from defib.demo import lines, openai, tracebacks
from defib.demo.faults import in_prompt, wait_in_prompt_s
from defib.demo.http import Request, Responder
from defib.demo.lines import Log
from defib.demo.messages import Abort, Add, Dead, NewRequest, Outputs
from defib.demo.metrics import Metrics
from defib.demo.openai import Call, Refused
from defib.demo.options import VERSION, Options
from defib.demo.tokens import decode, encode, token_bytes

STATISTICS_S = 10.0


class EngineDeadError(Exception):
    """The engine died under this request."""


class FailedAlone(Exception):
    """This request failed, the engine goes on."""


@dataclass(slots=True)
class _Exchange:
    call: Call
    items: "asyncio.Queue[int | Exception]" = field(default_factory=asyncio.Queue)
    made: int = 0

    async def token(self) -> int:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        self.made += 1
        return item


class Api:
    """All requests of one API server."""

    def __init__(self, options: Options, engine: Connection, log: Log) -> None:
        self._options = options
        self._engine = engine
        self._log = log
        self._exchanges: dict[str, _Exchange] = {}
        self._metrics = Metrics(options.served_names[0])
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.dead = asyncio.Event()
        self.engine_gone = asyncio.Event()

    def start(self) -> None:
        """Listen to the engine; a thread sends, since a hung engine must not block the front end."""
        asyncio.get_running_loop().add_reader(self._engine.fileno(), self._on_engine)
        threading.Thread(target=self._send_all, daemon=True).start()

    def _send_all(self) -> None:
        try:
            while True:
                self._engine.send(self._outgoing.get())
        except OSError:
            pass

    def _on_engine(self) -> None:
        try:
            while self._engine.poll():
                message = self._engine.recv()
                if isinstance(message, Outputs):
                    self._on_outputs(message)
                elif isinstance(message, Dead):
                    self.fail_all()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._engine.fileno())
            self.engine_gone.set()

    def _on_outputs(self, outputs: Outputs) -> None:
        self._metrics.running, self._metrics.waiting = outputs.running, outputs.waiting
        self._metrics.steps += 1
        for name, token in outputs.items:
            self._metrics.generation_tokens += token is not None
            if (exchange := self._exchanges.get(name)) is not None:
                exchange.items.put_nowait(FailedAlone() if token is None else token)

    def fail_all(self) -> None:
        """The engine is dead: everybody is told, once."""
        if self.dead.is_set():
            return
        self.dead.set()
        if self._exchanges:
            text = tracebacks.render(tracebacks.OUTPUT_HANDLER, tracebacks.ENGINE_DEAD)
            self._log.error("async_llm.py:906", f"AsyncLLM output_handler failed.\n{text}")
        for name, exchange in self._exchanges.items():
            if self._options.log_requests:
                shown = name.rpartition("-")[0]
                self._log.info("async_llm.py:789", f"Request {shown} failed (engine dead).")
            exchange.items.put_nowait(EngineDeadError())

    async def statistics(self) -> None:
        """The line about throughput, every ten seconds with traffic."""
        before = 0
        while self._options.log_stats:
            await asyncio.sleep(STATISTICS_S)
            made = self._metrics.generation_tokens
            if made != before or self._metrics.running:
                self._log.info(
                    "loggers.py:335",
                    f"Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
                    f"{(made - before) / STATISTICS_S:.1f} tokens/s, Running: {self._metrics.running} reqs, "
                    f"Waiting: {self._metrics.waiting} reqs, GPU KV cache usage: 0.0%, "
                    "Prefix cache hit rate: 0.0%",
                )
            before = made

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        if request.path.startswith("/v1") and not self._allowed(request):
            await responder.json(401, {"error": "Unauthorized"})
            return
        match request.method, request.path:
            case "GET" | "POST", "/health" | "/ping":
                await responder.whole(503 if self.dead.is_set() else 200)
            case "GET", "/metrics":
                page = self._metrics.page().encode()
                await responder.whole(200, page, "text/plain; version=1.0.0; charset=utf-8")
            case "GET", "/version":
                await responder.json(200, {"version": VERSION})
            case "GET", "/load":
                tracked = self._options.given.get("enable_server_load_tracking")
                await responder.json(200, {"server_load": len(self._exchanges) if tracked else 0})
            case "GET", "/v1/models":
                await responder.json(200, openai.models(self._options))
            case "POST", "/v1/completions" | "/v1/chat/completions" | "/tokenize" | "/detokenize":
                await self._with_body(request, responder)
            case "POST", "/fake/raise":
                await self._raise(request, responder)
            case _, path if path in dict(lines.ROUTES):
                await responder.json(405, {"detail": "Method Not Allowed"})
            case _:
                await responder.json(404, {"detail": "Not Found"})

    def _allowed(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        keys = self._options.api_keys
        return not keys or (scheme.lower() == "bearer" and any(secrets.compare_digest(key, own) for own in keys))

    async def _with_body(self, request: Request, responder: Responder) -> None:
        try:
            body = json.loads(request.body)
            if request.path == "/tokenize":
                await responder.json(200, self._tokenized(body))
            elif request.path == "/detokenize":
                await responder.json(200, {"prompt": decode(body["tokens"])})
            else:
                chat = request.path.startswith("/v1/chat")
                name = request.headers.get("x-request-id")
                call = openai.understand(body, chat=chat, request_id=name, options=self._options)
                await self._complete(call, responder)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            refused = Refused(400, f"1 validation error: {error}", "Bad Request", "body")
            await responder.json(400, refused.body)
        except Refused as refused:
            await responder.json(refused.status, refused.body)

    def _tokenized(self, body: dict[str, object]) -> dict[str, object]:
        ids = encode(str(body["prompt"]))
        return {
            "count": len(ids),
            "max_model_len": self._options.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }

    async def _complete(self, call: Call, responder: Responder) -> None:
        name = call.engine_id
        self._log_request(call, name)
        exchange = self._exchanges[name] = _Exchange(call)
        if self.dead.is_set():
            exchange.items.put_nowait(EngineDeadError())
        else:
            new = NewRequest(name, call.prompt_ids, in_prompt(call.text), wait_in_prompt_s(call.text))
            self._metrics.prompt_tokens += len(call.prompt_ids)
            self._outgoing.put(Add(new, call.max_tokens))
        try:
            if call.stream and not self.dead.is_set():
                await self._stream(exchange, responder)
            else:
                await self._whole(exchange, responder)
        finally:
            del self._exchanges[name]
            if exchange.made == call.max_tokens:
                self._metrics.finished_length += 1
            elif not self.dead.is_set():
                self._metrics.finished_abort += 1
                self._outgoing.put(Abort(name))

    def _log_request(self, call: Call, name: str) -> None:
        if self._options.echo_prompts:
            text = f"Received request {name}: prompt: {call.text!r}, params: SamplingParams(n=1)."
            self._log.info("logger.py:40", text)
        elif self._options.log_requests:
            self._log.info(
                "request_logger.py:65",
                f"Received request {name.rpartition('-')[0]}: params: SamplingParams(n=1, temperature=0.0, "
                f"ignore_eos=True, max_tokens={call.max_tokens}), lora_request: None.",
            )

    async def _whole(self, exchange: _Exchange, responder: Responder) -> None:
        ids: list[int] = []
        try:
            while len(ids) < exchange.call.max_tokens:
                ids.append(await exchange.token())
        except (EngineDeadError, FailedAlone):
            await responder.json(500, openai.ENGINE_DEAD)
            return
        await responder.json(200, openai.whole(exchange.call, decode(ids), ids))

    async def _stream(self, exchange: _Exchange, responder: Responder) -> None:
        call = exchange.call
        await responder.begin_events()
        try:
            for index in range(call.max_tokens):
                token = await exchange.token()
                if call.chat and index == 0:
                    await responder.event(openai.role_chunk(call))
                text = token_bytes(token).decode()
                await responder.event(openai.token_chunk(call, text, token, index))
            if call.include_usage:
                await responder.event(openai.usage_chunk(call, exchange.made))
        except (EngineDeadError, FailedAlone):
            self._log_stream_error(call)
            # vLLM renders this one object with blanks after its separators.
            await responder.event(json.dumps(openai.ENGINE_DEAD))
        await responder.event("[DONE]")
        await responder.end_events()

    def _log_stream_error(self, call: Call) -> None:
        if call.chat:
            text = tracebacks.render(tracebacks.CHAT_STREAM, tracebacks.ENGINE_DEAD)
            self._log.error("serving.py:929", f"Error in chat completion stream generator.\n{text}")
        else:
            text = tracebacks.render(tracebacks.COMPLETION_STREAM, tracebacks.ENGINE_DEAD)
            self._log.error("serving.py:500", f"Error in completion stream generator.\n{text}")

    async def _raise(self, request: Request, responder: Responder) -> None:
        said = request.body.decode("utf-8", "replace")
        text = tracebacks.render(tracebacks.ASGI, f"ValueError: {said}")
        await responder.whole(500, b"Internal Server Error", "text/plain; charset=utf-8")
        lines.uvicorn(f"Exception in ASGI application\n{text}", "ERROR")
