"""The desk of the gateway: which exchange goes to the worker, waits, is parked, released, taken back or ended.

All of its state changes happen in the loop's thread. The rules:

- Nothing is sent unless the gate is open, and only to the address of the gate's generation.
- A parked answer is released by a ruling, by the end of its time while nobody paused the gate, or by the end of
  the pause's lease. Whatever is released is over: it can't be replayed any more.
- `hold` takes back everything that was sent to the dead generation, parked or not, in one step: what had delivered
  nothing waits to be sent again if it may, the rest is told. So no order of symptom, finding and verdict can both
  deliver an error and replay its exchange.
- Every accepted exchange ends once, in `_end`.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Callable
from typing import Any

from defib.gateway import answers
from defib.gateway.answer import Answer
from defib.gateway.answers import Problem
from defib.gateway.events import Kind
from defib.gateway.exchange import Exchange, State
from defib.gateway.gate import Gate, GateKeeper
from defib.gateway.heads import RequestHead
from defib.gateway.holding import Holding
from defib.gateway.journal import Journal
from defib.gateway.outlet import Outlet, incident_field
from defib.gateway.replaying import Replaying
from defib.gateway.rules import GENERATION_PATHS, METRICS_PATH, NO_PROGRESS_PATHS, RELAYED_PROBE_PATHS, Limits, Rules
from defib.gateway.telling import Outcome, Teller
from defib.gateway.upstream import Pool, Upstream, check_address

JOINED_WRITE_BYTES = 64 << 10
"""Head and body up to this are sent in one write."""
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""A connection that failed for these says nothing of the worker."""


class Relay:
    """See the module. Times of the gate are `loop.time()`."""

    def __init__(self, rules: Rules, limits: Limits, teller: Teller, journal: Journal) -> None:
        self.rules, self.limits, self.teller, self.journal = rules, limits, teller, journal
        self.loop = asyncio.get_running_loop()
        self.keeper = GateKeeper()
        self.pool = Pool(self.loop, limits)
        self.holding = Holding(self.loop, limits, self._expired, lambda: self.keeper.incident)
        self.exchanges: dict[int, Exchange] = {}
        self.draining = False
        self.on_end: Callable[[], None] = lambda: None
        """Called after each exchange's end."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when an exchange is accepted while there was none."""
        self.body_bytes = 0
        """Request bodies in memory, those still being read included; kept by the clients' connections."""
        self._name = secrets.token_hex(4)
        self._number = 0
        self._ramp: asyncio.TimerHandle | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._replaying: Replaying | None = None
        self._supervised = False
        self._lost_at = self.loop.time()

    # --- from the clients ---

    def accept(self, head: RequestHead, body: bytes | None, outlet: Outlet, connection: int, peer: str) -> Exchange:
        """A request is there (its body too, unless it is None). `submit` must follow."""
        self._number += 1
        exchange = Exchange(self._number, f"{self._name}-{self._number}", head, body, outlet, connection, peer)
        rules, path = self.rules, head.path
        exchange.rule = rules.replay_rule(head.method, path)
        exchange.generates = path in GENERATION_PATHS and head.method == "POST"
        exchange.known = exchange.generates or exchange.rule is not None
        exchange.computes = exchange.known and path not in NO_PROGRESS_PATHS
        exchange.probe = path in rules.probe_paths or path == METRICS_PATH
        if not self.exchanges:
            self.on_begin()
        self.exchanges[exchange.number] = exchange
        self.teller.counts.accepted += 1
        size, generation = exchange.body_bytes, self.keeper.generation
        self.journal.begin(exchange.id, head.method, head.path, size, generation)
        return exchange

    def submit(self, exchange: Exchange) -> None:
        """An accepted exchange asks to be sent."""
        keeper = self.keeper
        if keeper.gate is Gate.OPEN and not self.draining and (not len(self.holding) or exchange.probe):
            self._dispatch(exchange)
        elif self.draining:
            self._refuse(exchange, answers.draining())
        elif keeper.gate is Gate.REFUSING:
            self._refuse(exchange, answers.refusing(keeper.reason, keeper.retry_after_s))
        elif exchange.probe or exchange.head.websocket:
            if keeper.gate is Gate.PAUSED:
                self._dispatch(exchange)
            else:
                self._refuse(exchange, answers.recovering(self._ready_in_s()))
        else:
            self._wait(exchange)

    def gone(self, exchange: Exchange) -> None:
        """Its client went away: given up at once."""
        answer = exchange.answer
        self._let_go(exchange)
        tunnel = answer is not None and answer.tunnel
        self._end(exchange, Outcome.ANSWERED if tunnel else Outcome.GIVEN_UP)

    def probe_answer(self, head: RequestHead) -> tuple[int, bytes] | None:
        """Our own answer to a probe: would a request sent now be accepted? None: it isn't one of those."""
        if head.path not in self.rules.probe_paths or head.path in RELAYED_PROBE_PATHS:
            return None
        keeper = self.keeper
        good = keeper.accepts and not self.draining
        gate = "draining" if self.draining else keeper.gate.value
        page = {"status": "ok" if good else "unavailable", "gate": gate, "generation": keeper.generation}
        return (200 if good else 503), answers.json_page(page)

    # --- waiting ---

    def _ready_in_s(self) -> float | None:
        return self.keeper.ready_in_s(self.loop.time())

    def _wait(self, exchange: Exchange) -> None:
        exchange.look_into(self.limits)
        ready_in_s = self._ready_in_s()
        if ready_in_s is not None and ready_in_s > exchange.hold_left_s:
            self._refuse(exchange, answers.recovering(ready_in_s))
        elif self.holding.full(exchange):
            self._refuse(exchange, answers.overloaded("requests that wait for the recovery"))
        else:
            self.holding.add(exchange)
            if self.keeper.gate in (Gate.HELD, Gate.STARTING):
                self._count_held(exchange)

    def _count_held(self, exchange: Exchange) -> None:
        self.teller.counts.held += not exchange.was_held
        exchange.was_held = True

    def _expired(self, exchange: Exchange) -> None:
        self._refuse(exchange, answers.recovering(self._ready_in_s()))

    def _pump(self) -> None:
        """Sends what waits, at the ramp, while the gate is open."""
        if self._ramp is not None:
            return
        while self.keeper.gate is Gate.OPEN and (exchange := self.holding.pop()) is not None:
            self._dispatch(exchange)
            if self.keeper.ramp_per_s > 0:
                self._ramp = self.loop.call_later(1 / self.keeper.ramp_per_s, self._ramp_turn)
                return

    def _ramp_turn(self) -> None:
        self._ramp = None
        self._pump()

    # --- sending ---

    def _dispatch(self, exchange: Exchange) -> None:
        exchange.state, exchange.generation = State.SENT, self.keeper.generation
        exchange.attempts += 1
        self.teller.counts.replayed += exchange.replayed
        answer = exchange.answer = Answer(self, exchange, self.loop.time())
        upstream = None if exchange.head.websocket else self.pool.take()
        if upstream is not None:
            self._send(exchange, answer, upstream)
        else:
            exchange.connect = self.loop.create_task(self._connect(exchange, answer))

    async def _connect(self, exchange: Exchange, answer: Answer) -> None:
        try:
            upstream = await self.pool.connect(self.keeper.address, exchange.generation)
        except OSError as error:
            if exchange.answer is answer:
                exchange.connect = None
                self._not_connected(exchange, answer, error)
            return
        if exchange.answer is answer:
            exchange.connect = None
            self._send(exchange, answer, upstream)
        else:
            upstream.abort()

    def _not_connected(self, exchange: Exchange, answer: Answer, error: OSError) -> None:
        if error.errno in _OWN_LIMITS:
            exchange.answer = None
            self._refuse(exchange, answers.overloaded(f"connections ({errno.errorcode[error.errno or 0]})"))
            return
        answer.refused = True
        self.failed(answer, Kind.REFUSED, 0)

    def _send(self, exchange: Exchange, answer: Answer, upstream: Upstream) -> None:
        answer.upstream, upstream.answer = upstream, answer
        answer.reused = upstream.used > 0
        upstream.used += 1
        exchange.reached = True
        if exchange.outlet.client.write_paused:
            upstream.hold_back("client", True)
        head, body = self._head_to_worker(exchange), exchange.body or b""
        if len(body) <= JOINED_WRITE_BYTES:
            upstream.write(head + body)
        else:
            upstream.write(head)
            upstream.write(body)
        if exchange.source is not None:
            exchange.source.body_to(upstream)

    def _head_to_worker(self, exchange: Exchange) -> bytes:
        head = exchange.head
        if head.websocket:
            return head.raw
        own = self.rules.own_request_ids and exchange.generates
        name = f"defib-{exchange.id}-{exchange.attempts}".encode() if own else None
        if exchange.body is None and head.length < 0:
            framing = b"Transfer-Encoding: chunked\r\n"
        elif exchange.body_bytes or head.method in ("POST", "PUT", "PATCH"):
            framing = b"Content-Length: %d\r\n" % exchange.body_bytes
        else:
            framing = b""
        return head.to_worker(framing, name, exchange.peer)

    # --- Desk: from the answers ---

    def failed(self, answer: Answer, kind: Kind, status: int) -> None:
        """See Desk."""
        self.noticed(answer, kind, status)
        exchange = answer.exchange
        answer.smell = kind
        if self.keeper.gate is Gate.REFUSING:
            self._end_with(exchange, answers.refusing(self.keeper.reason, self.keeper.retry_after_s))
        elif exchange.probe or not self._parks():
            answer.release()
        else:
            exchange.state = State.PARKED
            self.teller.counts.parked += 1
            answer.timer = self.loop.call_later(self.limits.park_s, self._park_over, answer, False)

    def _parks(self) -> bool:
        """Parking needs somebody who rules."""
        lost_s = self.loop.time() - self._lost_at
        return self.keeper.parking and (self._supervised or lost_s < self.limits.lease_s)

    def _park_over(self, answer: Answer, last: bool) -> None:
        answer.timer = None
        if self.keeper.gate is Gate.PAUSED and not last:
            answer.timer = self.loop.call_later(self.limits.hold_plain_s, self._park_over, answer, True)
        else:
            answer.release()

    def noticed(self, answer: Answer, kind: Kind, status: int) -> None:
        """See Desk."""
        exchange = answer.exchange
        if exchange.probe:
            return
        self.teller.symptom(
            generation=exchange.generation,
            exchange=exchange.id,
            connection=str(exchange.connection),
            body=self.teller.body_hash(exchange.body) or exchange.id,
            kind=kind.value,
            status=status,
        )

    def returned(self, answer: Answer, upstream: Upstream, reusable: bool) -> None:
        """See Desk."""
        source = answer.exchange.source
        if reusable and (source is None or source.body_done):
            self.pool.give(upstream)
        else:
            upstream.abort()

    def lost_idle(self, answer: Answer) -> bool:
        """See Desk: a kept connection may end just when it is used again; safe requests are sent once more."""
        exchange = answer.exchange
        safe = exchange.rule is not None or exchange.head.method in ("GET", "HEAD")
        if not answer.reused or not safe or exchange.body is None or exchange.head.no_replay:
            return False
        if not self.keeper.accepts or exchange.attempts >= self.limits.attempts:
            return False
        exchange.attempts += 1
        fresh = exchange.answer = Answer(self, exchange, self.loop.time())
        exchange.connect = self.loop.create_task(self._connect(exchange, fresh))
        return True

    def delivered(self, answer: Answer) -> None:
        """See Desk."""
        self._replay_over(answer.exchange, True)

    def done(self, answer: Answer, outcome: Outcome) -> None:
        """See Desk."""
        self._end(answer.exchange, outcome)

    def fields(self, exchange: Exchange) -> bytes:
        """See Desk."""
        if not exchange.replayed:
            return b""
        return b"X-Defib-Replayed: 1\r\n" + incident_field(self.keeper.incident)

    # --- ends ---

    def _let_go(self, exchange: Exchange) -> None:
        """Nothing works on it any more: no queue, no connection, no timer."""
        self.holding.remove(exchange)
        exchange.stop_timer()
        if exchange.connect is not None:
            exchange.connect.cancel()
            exchange.connect = None
        if exchange.answer is not None:
            exchange.answer.drop()
            exchange.answer = None

    def _refuse(self, exchange: Exchange, problem: Problem) -> None:
        """It ends with our answer, having delivered nothing."""
        told = exchange.outlet.head_sent
        exchange.outlet.problem(problem, self._reusable(exchange))
        self._end(exchange, Outcome.ENDED_WITH_ERROR if told else Outcome.REFUSED)

    def _end_with(self, exchange: Exchange, problem: Problem) -> None:
        """It was sent, and ends with our answer."""
        untouched = exchange.outlet.untouched
        self._let_go(exchange)
        exchange.outlet.problem(problem if untouched else answers.interrupted(), self._reusable(exchange))
        self._end(exchange, Outcome.ENDED_WITH_ERROR)

    @staticmethod
    def _reusable(exchange: Exchange) -> bool:
        return exchange.source is None or exchange.source.body_done

    def _end(self, exchange: Exchange, outcome: Outcome) -> None:
        if exchange.state is State.ENDED:
            return
        exchange.state = State.ENDED
        exchange.answer = exchange.source = None
        exchange.stop_timer()
        del self.exchanges[exchange.number]
        self.teller.counts.add(outcome)
        self.journal.end(exchange.id, outcome)
        self._replay_over(exchange, outcome in (Outcome.ANSWERED, Outcome.PASSED_ERROR))
        self.on_end()

    def _replay_over(self, exchange: Exchange, answered: bool) -> None:
        replaying = self._replaying
        if replaying is not None and replaying.over(exchange.number, answered):
            self._replaying = None
            seconds = self.loop.time() - replaying.started
            self.teller.replayed(replaying.generation, replaying.answered, replaying.failed, seconds)

    # --- rulings ---

    def open(self, generation: int, address: str, ramp_per_s: float) -> int:
        """The generation serves. Returns how many exchanges it is going to be sent that waited. ValueError."""
        check_address(address)
        before, held = self.keeper.generation, self.keeper.gate in (Gate.HELD, Gate.STARTING)
        moved = address != self.keeper.address
        ruled = self.keeper.open(generation, address, ramp_per_s)
        self._watch_lease()
        if self._ramp is not None:
            self._ramp.cancel()
            self._ramp = None
        if generation > before:
            self._take_back_all(generation - 1)
        elif ruled:
            self._release_all()
        if moved:
            self.pool.drop()
        self.pool.move_to(generation)
        waiting = [exchange.number for exchange in self.holding]
        if waiting and (held or generation > before):
            self._replaying = Replaying(generation, self.loop.time(), set(waiting))
        self._pump()
        return len(waiting)

    def pause(self, generation: int, lease_s: float) -> None:
        """Nothing new is sent until a ruling or the lease's end."""
        self.keeper.pause(generation, self.loop.time(), lease_s)
        self._watch_lease()

    def hold(self, generation: int, lease_s: float, ready_in_s: float | None, incident: str) -> None:
        """The generation is dead: everything of it is taken back."""
        self.keeper.hold(generation, self.loop.time(), lease_s, ready_in_s, incident)
        self._watch_lease()
        self._replaying = None
        for exchange in self.holding:
            self._count_held(exchange)
        self.pool.drop()
        self._take_back_all(generation)
        self._turn_away_the_hopeless()

    def refuse(self, reason: str, retry_after_s: float) -> None:
        """Nothing is accepted; what waits or is parked is told why."""
        self.keeper.refuse(reason, retry_after_s)
        self._watch_lease()
        self._replaying = None
        problem = answers.refusing(reason, retry_after_s)
        for exchange in self.holding:
            self.holding.remove(exchange)
            self._refuse(exchange, problem)
        for exchange in list(self.exchanges.values()):
            if exchange.state is State.PARKED:
                self._end_with(exchange, problem)

    def supervised(self, clients: int) -> None:
        """So many supervisors are connected."""
        if self._supervised and not clients:
            self._lost_at = self.loop.time()
        self._supervised = clients > 0

    def _watch_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if self.keeper.lease_ends is not None:
            self._lease = self.loop.call_at(self.keeper.lease_ends, self._lease_over)

    def _lease_over(self) -> None:
        self._lease = None
        # The loop may call a timer a clock tick early.
        if self.keeper.expire(max(self.loop.time(), self.keeper.lease_ends or 0.0)):
            self._release_all()
            self._pump()

    def _release_all(self) -> None:
        for exchange in list(self.exchanges.values()):
            if exchange.state is State.PARKED and exchange.answer is not None:
                exchange.answer.release()

    def _take_back_all(self, generation: int) -> None:
        for exchange in list(self.exchanges.values()):
            if exchange.state in (State.SENT, State.PARKED) and exchange.generation <= generation:
                self._take_back(exchange)

    def _take_back(self, exchange: Exchange) -> None:
        tunnel = exchange.answer is not None and exchange.answer.tunnel
        self._let_go(exchange)
        if exchange.probe:
            self._refuse(exchange, answers.recovering(self._ready_in_s()))
            return
        if tunnel or not exchange.outlet.untouched:
            exchange.outlet.problem(answers.interrupted(), self._reusable(exchange))
            self._end(exchange, Outcome.ENDED_WITH_ERROR)
            return
        exchange.deaths += exchange.reached
        why = exchange.why_not_again(self.limits)
        if why is not None:
            exchange.outlet.problem(answers.not_replayed(why), self._reusable(exchange))
            self._end(exchange, Outcome.ENDED_WITH_ERROR)
            return
        exchange.replayed = exchange.replayed or exchange.reached
        exchange.reached = False
        self._wait(exchange)

    def _turn_away_the_hopeless(self) -> None:
        """Those whose limit is shorter than the time that the worker needs are told at once."""
        ready_in_s = self._ready_in_s()
        if ready_in_s is None:
            return
        now = self.loop.time()
        for exchange in self.holding:
            if ready_in_s > exchange.hold_left_s - (now - exchange.wait_started):
                self.holding.remove(exchange)
                self._refuse(exchange, answers.recovering(ready_in_s))

    # --- turns ---

    def sweep(self) -> None:
        """Once a second: what is bounded by coarse limits."""
        self.pool.sweep()
        before = self.loop.time() - self.limits.stream_head_s
        for exchange in list(self.exchanges.values()):
            if exchange.answer is not None and exchange.answer.since < before:
                exchange.answer.give_head()

    def tell(self) -> None:
        """A few times a second: progress and counts, if they changed."""
        parked = any(e.state is State.PARKED for e in self.exchanges.values())
        calm = self.keeper.gate is Gate.OPEN and not parked
        self.teller.turn(self.keeper.generation, self.in_flight, calm)

    @property
    def in_flight(self) -> int:
        """Exchanges that were sent and have not ended."""
        return sum(e.state in (State.SENT, State.PARKED) for e in self.exchanges.values())

    def end_all(self) -> None:
        """The time to drain is over, or we stop at once: everybody is told."""
        for exchange in list(self.exchanges.values()):
            if self.holding.remove(exchange):
                self._refuse(exchange, answers.draining())
            else:
                self._end_with(exchange, answers.draining())

    def drain(self) -> None:
        """No new exchanges; those that wait are told now."""
        self.draining = True
        for exchange in self.holding:
            self.holding.remove(exchange)
            self._refuse(exchange, answers.draining())

    def shapes(self) -> list[dict[str, Any]]:
        """The exchanges under way, as far as may be told."""
        return [e.shape() for e in list(self.exchanges.values())[: self.limits.shapes]]
