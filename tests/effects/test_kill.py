"""Ending a generation, with a launcher of thirty lines and a clock that moves when it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from defib.drivers.launcher_client import Process
from defib.effects.kill import LIMIT_S, TRACKER_S, Killed, kill_tree
from defib.runtime.seam import SeamError, SeamLost, SeamRefused, SeamTimeout


def proc(pid: int, name: str = "EngineCore", cmdline: str = "", state: str = "S") -> Process:
    return Process(pid, 1000 + pid, name, cmdline, pid == 1, state, ("descendant",))


TRACKER = proc(9, "python", "python -c from multiprocessing.resource_tracker import main;main(5)")


@dataclass
class FakeLauncher:
    """Processes die of SIGKILL unless they are `immune`; each look takes `look_s`."""

    alive: dict[int, Process] = field(default_factory=dict)
    immune: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    """pid -> why it is not signalled, once."""
    births: list[Process] = field(default_factory=list)
    """Appear one at a time, when something is signalled: a fork that was faster."""
    failures: list[SeamError] = field(default_factory=list)
    sweep_fails: SeamError | None = None
    look_s: float = 0.3
    now: float = 100.0
    killed_at: dict[int, float] = field(default_factory=dict)
    swept: int = 0

    async def tree(self, generation: int) -> tuple[Process, ...]:
        self.now += self.look_s
        if self.failures:
            raise self.failures.pop(0)
        return tuple(self.alive.values())

    async def signal(self, generation: int, targets: Iterable[Process], number: int) -> dict[str, Any]:
        assert number == 9
        no = []
        for p in targets:
            if p.pid in self.refused:
                no.append({"target": [p.pid, p.start], "why": self.refused.pop(p.pid)})
            elif p.pid not in self.killed_at:
                self.killed_at[p.pid] = self.now
                if p.pid not in self.immune:
                    del self.alive[p.pid]
            else:
                raise AssertionError(f"{p.pid} was signalled twice")
        if self.births:
            born = self.births.pop(0)
            self.alive[born.pid] = born
        return {"sent": [], "gone": [], "refused": no}

    async def sweep(self, generation: int) -> dict[str, Any]:
        self.swept += 1
        if self.sweep_fails:
            raise self.sweep_fails
        return {"removed": ["/dev/shm/psm_1", "/run/w1.sock"]}


def end(launcher: FakeLauncher) -> Killed:
    return asyncio.run(kill_tree(launcher, 1, lambda: launcher.now))


def of(*processes: Process, **more: Any) -> FakeLauncher:
    return FakeLauncher({p.pid: p for p in processes}, **more)


def test_everything_is_killed_and_what_it_left_is_swept() -> None:
    launcher = of(proc(1, "vllm"), proc(2))
    killed = end(launcher)
    assert killed.ok and {p.pid for p in killed.ended} == {1, 2} and killed.left == ()
    assert killed.told() == "vllm[1], EngineCore[2]; swept 2 leftovers"


def test_the_resource_tracker_goes_last_and_has_its_time() -> None:
    launcher = of(proc(1), TRACKER)
    assert end(launcher).ok
    assert launcher.killed_at[9] - launcher.killed_at[1] >= TRACKER_S


def test_a_tracker_that_ends_by_itself_is_not_killed() -> None:
    class Tidy(FakeLauncher):
        async def tree(self, generation: int) -> tuple[Process, ...]:
            if self.killed_at:
                self.alive.pop(TRACKER.pid, None)
            return await super().tree(generation)

    launcher = Tidy({1: proc(1), 9: TRACKER})
    killed = end(launcher)
    assert killed.ok and set(launcher.killed_at) == {1}
    assert {p.pid for p in killed.ended} == {1, 9}


def test_a_child_that_was_forked_meanwhile_is_killed_too() -> None:
    launcher = of(proc(1), births=[proc(30), proc(31)])
    killed = end(launcher)
    assert killed.ok and {p.pid for p in killed.ended} == {1, 30, 31}


def test_a_process_that_survives_sigkill_is_told_after_the_limit_and_nothing_is_swept() -> None:
    launcher = of(proc(1), proc(2, state="D"), immune={2})
    killed = end(launcher)
    assert not killed.ok and [p.pid for p in killed.left] == [2]
    assert [p.pid for p in killed.ended] == [1] and launcher.swept == 0
    assert killed.told() == "alive after SIGKILL: EngineCore[2] state D"
    assert LIMIT_S <= launcher.now - 100.0 <= LIMIT_S + 1.0


def test_a_signal_that_was_refused_is_tried_again() -> None:
    launcher = of(proc(1), proc(2), refused={2: "Operation not permitted"})
    assert end(launcher).ok and 2 in launcher.killed_at


def test_a_process_that_is_never_signalled_is_told_with_the_reason() -> None:
    class Stubborn(FakeLauncher):
        async def signal(self, generation: int, targets: Iterable[Process], number: int) -> dict[str, Any]:
            return {"refused": [{"target": [p.pid, p.start], "why": "it is of generation 7"} for p in targets]}

    killed = end(Stubborn({1: proc(1)}))
    assert not killed.ok and killed.told() == "not signalled (it is of generation 7): EngineCore[1] state S"


def test_a_launcher_that_is_away_for_a_moment_is_waited_for() -> None:
    launcher = of(proc(1), failures=[SeamLost("tree: no connection"), SeamTimeout("tree: no reply")])
    assert end(launcher).ok and launcher.swept == 1


def test_a_launcher_that_stays_away_is_an_error_after_the_limit() -> None:
    launcher = of(proc(1), failures=[SeamLost("tree: no connection") for _ in range(999)])
    killed = end(launcher)
    assert not killed.ok and killed.told() == "the launcher did not answer: tree: no connection"
    assert launcher.now - 100.0 <= LIMIT_S + 1.0 and launcher.swept == 0


def test_a_generation_that_is_not_current_has_no_process() -> None:
    launcher = of(failures=[SeamRefused("stale_generation", "generation 1 is not current, 2 is")])
    assert end(launcher).ok


def test_another_refusal_is_an_error() -> None:
    launcher = of(failures=[SeamRefused("stale_epoch", "epoch 2 is gone")])
    killed = end(launcher)
    assert not killed.ok and "stale_epoch" in killed.told()


def test_a_sweep_that_fails_does_not_make_a_worker_immortal() -> None:
    launcher = of(proc(1), sweep_fails=SeamRefused("refused", "generation 1 is not dead"))
    killed = end(launcher)
    assert killed.ok and killed.swept == () and killed.told() == "EngineCore[1]"


def test_an_empty_tree_needs_no_signal() -> None:
    launcher = of()
    killed = end(launcher)
    assert killed.ok and launcher.killed_at == {} and killed.told().startswith("nothing was left")
