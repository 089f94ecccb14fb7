"""The machine at its edges: one sentence of its contract each, on the shortest story that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tests.core.stories import REACH, Story

from defib.core.budget import Budget, Rung
from defib.core.commands import (
    ClearCaches,
    Finish,
    HoldTraffic,
    KillTree,
    Launch,
    Note,
    OpenTraffic,
    PauseTraffic,
    Persist,
    Probe,
    RefuseTraffic,
    Settle,
    Wait,
)
from defib.core.events import (
    Adopted,
    CanaryDone,
    CanaryOutcome,
    Effect,
    Elapsed,
    Exited,
    FaultClass,
    GatewayBack,
    GpuFault,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Progressed,
    Resume,
    ResumeOrdered,
    StopOrdered,
)
from defib.core.machine import Machine
from defib.core.starting import ROOT_FOLLOWS_S
from defib.core.state import MAX_WORKED, Phase, Rules
from defib.core.steps import EXIT_BUDGET_SPENT, EXIT_CONFIG
from defib.core.witnesses import MAX_XIDS, Case

C = TypeVar("C")
OBSERVE = Rules(observe=True)


def said(story: Story, kind: type[C]) -> list[C]:
    """The commands of this kind in the last step."""
    return [c for c in story.commands if isinstance(c, kind)]


def noted(story: Story, name: str) -> dict[str, Any]:
    """The fields of a note of the last step."""
    (note,) = [n for n in said(story, Note) if n.name == name]
    return dict(note.fields)


def health(story: Story) -> Story:
    return story.tell(lambda at: HealthFailed(at, story.state.generation, 503))


# --- suspecting ---


def test_what_was_refuted_does_not_come_back_with_a_later_exit() -> None:
    story = Story().serves().found().canary().exits(ProcessKind.ENGINE)
    told = noted(story, "verdict")
    assert (told["cause"], told["fault"], told["group_t"]) == ("exit:engine", "unknown", "none")


def test_symptoms_alone_stop_nobodys_traffic_and_a_finding_does() -> None:
    story = Story().serves().symptom()
    assert not said(story, PauseTraffic)
    assert said(story.found(), PauseTraffic)
    assert not said(story.found(), PauseTraffic), "it is paused already"


@pytest.mark.parametrize("first", ["found", "symptom"])
def test_health_503_beside_a_witness_of_group_t_is_a_verdict(first: str) -> None:
    story = Story().serves()
    assert health(getattr(story, first)()).state.phase is Phase.CAPTURING
    story = health(Story().serves())
    assert said(story, PauseTraffic), "503 alone is an accusation"
    assert getattr(story, first)().state.phase is Phase.CAPTURING


def test_a_pause_is_said_again_while_it_is_needed() -> None:
    story = Story().serves().found().elapses("lease", 10.0)
    assert said(story, PauseTraffic) and "lease" in dict(story.state.waits)


def test_a_token_that_was_under_way_refutes_nothing() -> None:
    story = Story().serves().found().token(after=0.2)
    assert story.state.phase is Phase.SUSPECTING
    assert story.token(after=0.1).state.phase is Phase.SERVING, "250 ms after the finding it does"


def test_a_token_does_not_refute_what_the_engine_says_of_itself() -> None:
    story = health(Story().serves()).token(after=1.0)
    assert story.state.phase is Phase.SUSPECTING


def test_a_canary_that_times_out_while_tokens_move_is_blind() -> None:
    story = health(Story().serves()).token(after=1.0).canary(CanaryOutcome.TIMEOUT, sent=1.0)
    assert story.state.phase is Phase.SUSPECTING
    assert story.state.case is not None and story.state.case.canary is CanaryOutcome.BLIND
    story = health(Story().serves()).canary(CanaryOutcome.TIMEOUT)
    assert story.state.phase is Phase.CAPTURING, "and without tokens it is a second witness"


def test_one_canary_is_heard_once() -> None:
    story = Story().serves().found()
    ticket = story.state.probe
    story.canary(CanaryOutcome.BLIND)
    story.tell(lambda at: CanaryDone(at, ticket, CanaryOutcome.ERROR, at))
    assert story.state.phase is Phase.SUSPECTING and story.commands == []


def test_symptoms_rest_after_a_false_alarm_that_only_they_had_raised() -> None:
    story = Story().serves().symptom().canary().symptom()
    assert story.state.phase is Phase.SERVING
    story.at += 2.0
    assert story.symptom().state.phase is Phase.SUSPECTING
    story = Story().serves().found().canary().symptom()
    assert story.state.phase is Phase.SUSPECTING, "another accusation, another alarm"


def test_a_stale_suspicion_does_not_end_the_next_one() -> None:
    story = Story().serves().found()
    window = dict(story.state.waits)["phase"]
    story.canary().found()
    story.tell(lambda at: Elapsed(at, "phase", window))
    assert story.state.phase is Phase.SUSPECTING and story.commands == []


# --- probation ---


def launched_again() -> Story:
    return Story().serves().exits().recovers()


def test_a_launch_counts_until_it_survived_probation_under_traffic() -> None:
    story = launched_again().elapses("probation", 120.0)
    assert len(story.state.ledger) == 1 and said(story, Wait), "nobody asked it for anything yet"
    story.token().elapses("probation", 120.0)
    assert story.state.ledger == () and "probation" not in dict(story.state.waits)
    assert story.saved is not None and story.saved.ledger == ()


def test_no_probation_ends_while_the_generation_stands_accused() -> None:
    story = launched_again().token().found().elapses("probation", 120.0)
    assert len(story.state.ledger) == 1 and [w.name for w in said(story, Wait)] == ["probation"]
    story.canary().elapses("probation", 120.0)
    assert story.state.ledger == ()


def test_a_restarted_supervisor_forgives_the_same_launch() -> None:
    story = launched_again()
    saved, launched_at = story.saved, story.state.launched_at
    assert saved is not None
    drifted = replace(saved, ledger=tuple((at + 0.0004, c, r) for at, c, r in saved.ledger))
    story.machine = Machine(Rules())
    story.boots(drifted, generation=2, launched_at=launched_at + 0.2).token().elapses("probation", 120.0)
    assert story.state.ledger == ()


def test_a_pause_does_not_make_a_launch_count_for_ever() -> None:
    story = launched_again().token().tell(PauseOrdered).tell(ResumeOrdered).elapses("probation", 120.0)
    assert story.state.ledger == ()


# --- recovery ---


def test_the_log_that_is_read_while_capturing_names_the_cause_and_the_caches() -> None:
    story = Story().serves().exits(ProcessKind.ENGINE).found()
    assert story.state.cause == "ima" and noted(story, "cause")["fault"] == "poisoned_context"
    story.done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert said(story, ClearCaches)


def test_caches_stay_where_the_fault_is_not_theirs() -> None:
    story = Story().serves().found(fault=FaultClass.OOM_GPU).exits(ProcessKind.ENGINE)
    story.done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert story.state.phase is Phase.LAUNCHING and not said(story, ClearCaches)


@pytest.mark.parametrize("phase", [Phase.CAPTURING, Phase.GATING, Phase.CLEARING])
def test_what_may_fail_does_not_block(phase: Phase) -> None:
    story = REACH[phase]().elapses(after=60.0)
    assert story.state.phase not in (phase, Phase.STUCK, Phase.DOWN)


def test_a_kill_that_does_not_report_back_is_stuck_and_tried_again() -> None:
    story = REACH[Phase.KILLING]().elapses(after=30.0)
    assert story.state.phase is Phase.STUCK and said(story, RefuseTraffic)
    assert said(story.elapses(after=30.0), KillTree)


def test_a_gate_that_finds_a_process_is_stuck_and_one_that_measures_nothing_goes_on() -> None:
    assert REACH[Phase.GATING]().done(Effect.GATE, ok=False, stuck=True).state.phase is Phase.STUCK
    assert REACH[Phase.GATING]().done(Effect.GATE, ok=False).state.phase is Phase.CLEARING


def test_a_launch_that_does_not_report_back_gives_its_number_back() -> None:
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].generation == 2
    story.elapses(after=20.0)
    assert (story.state.phase, story.state.pending) == (Phase.LAUNCHING, 0)
    story.elapses(after=Rules().launch_retry_s)
    assert (story.state.phase, story.state.generation) == (Phase.KILLING, 1)
    story.done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].generation == 2


def test_a_launch_that_could_not_be_made_counts_overall_and_against_no_rung() -> None:
    story = Story(Rules(rungs=(Rung("same-again", 1),), budget=Budget(3600.0, 3))).serves().exits()
    story.done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    for _ in range(2):
        story.done(Effect.LAUNCH, ok=False).elapses(after=5.0).done(Effect.KILL).done(Effect.GATE)
        assert said(story, Launch)[0].rung == "same-again"
    story.done(Effect.LAUNCH, ok=False).elapses(after=5.0).done(Effect.KILL).done(Effect.GATE)
    assert story.state.phase is Phase.DOWN


def test_a_pause_between_two_tries_of_a_launch_leaves_no_generation_that_is_not_there() -> None:
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    story.done(Effect.LAUNCH, ok=False).tell(PauseOrdered)
    assert (story.state.phase, story.state.generation) == (Phase.PAUSED, 1)
    story.tell(ResumeOrdered).done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].generation == 2


def test_a_launch_whose_answer_was_lost_is_taken_from_the_next_snapshot() -> None:
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    story.tell(lambda at: Adopted(at, 2, "a:2"))
    assert (story.state.phase, story.state.alive, story.state.address) == (Phase.LAUNCHING, True, "a:2")
    assert story.ready().canary().replayed().state.phase is Phase.SERVING
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    story.done(Effect.LAUNCH, ok=False).tell(lambda at: Adopted(at, 2, "a:2"))
    assert (story.state.phase, story.state.generation) == (Phase.LAUNCHING, 2)


def test_an_adoption_never_turns_the_generation_back() -> None:
    story = REACH[Phase.LAUNCHING]()
    before = story.state
    story.tell(lambda at: Adopted(at, 1, "a:1"))
    assert story.state == before and story.commands == []


def test_an_engine_that_dies_while_launching_waits_for_its_root_and_no_longer() -> None:
    story = REACH[Phase.LAUNCHING]().exits(ProcessKind.ENGINE, 1)
    assert story.state.phase is Phase.LAUNCHING
    assert [round(w.at - story.at, 3) for w in said(story, Wait)] == [ROOT_FOLLOWS_S]
    story.elapses(after=ROOT_FOLLOWS_S)
    assert story.state.phase is Phase.KILLING and noted(story, "rung_failed")["why"] == "an engine process exited"
    assert REACH[Phase.PROVING]().exits(ProcessKind.ENGINE, 1).state.phase is Phase.KILLING
    assert REACH[Phase.PROVING]().exits(ProcessKind.OTHER, 1).state.phase is Phase.PROVING


def test_a_relaunch_that_is_not_ready_in_time_is_the_rungs_failure() -> None:
    story = REACH[Phase.LAUNCHING]().elapses(after=900.0)
    assert story.state.phase is Phase.KILLING
    assert noted(story, "rung_failed")["why"] == "not ready within the start limit"


@pytest.mark.parametrize(
    ("outcome", "same_again", "fallback"),
    [
        (CanaryOutcome.ANSWERED, True, True),
        (CanaryOutcome.BLIND, True, True),
        (CanaryOutcome.DIFFERS, False, True),
        (CanaryOutcome.ERROR, False, False),
        (CanaryOutcome.TIMEOUT, False, False),
        (CanaryOutcome.REFUSED, False, False),
    ],
)
def test_what_proves_a_generation(outcome: CanaryOutcome, same_again: bool, fallback: bool) -> None:
    story = REACH[Phase.PROVING]().canary(outcome)
    assert (story.state.phase is Phase.REPLAYING) is same_again
    assert bool(said(story, OpenTraffic)) is same_again
    story = REACH[Phase.LAUNCHING]().exits().relaunches_again().ready().canary(outcome)
    assert (story.state.phase is Phase.REPLAYING) is fallback


def test_a_canary_that_never_reports_is_our_fault_and_not_the_workers() -> None:
    story = REACH[Phase.PROVING]().elapses(after=65.0)
    assert story.state.phase is Phase.REPLAYING and said(story, OpenTraffic)
    story = Story().boots().ready().elapses(after=65.0)
    assert story.state.phase is Phase.SERVING and said(story, OpenTraffic)


def test_what_was_proven_is_persisted_before_traffic_reaches_it() -> None:
    story = REACH[Phase.PROVING]().canary()
    kinds = [type(c) for c in story.commands]
    assert kinds.index(Persist) < kinds.index(OpenTraffic)
    assert story.saved is not None and story.saved.proven and story.saved.answered


def test_a_replay_that_never_reports_ends_with_its_limit() -> None:
    story = REACH[Phase.REPLAYING]().elapses(after=120.0)
    assert story.state.phase is Phase.SERVING and [s.outcome for s in said(story, Settle)] == ["recovered"]


def test_a_second_fault_while_replaying_belongs_to_the_same_incident() -> None:
    story = REACH[Phase.REPLAYING]().exits()
    assert noted(story, "verdict")["incident"] == "0001-g1"
    assert not said(story, Settle)
    story.recovers()
    assert [s.incident for s in said(story, Settle)] == ["0001-g1"]


def test_the_first_answer_of_all_may_be_a_relaunchs() -> None:
    story = Story().boots().ready().canary(CanaryOutcome.BLIND)
    assert not story.state.answered, "an error proves nothing yet"
    assert story.exits().relaunches().ready().canary().state.answered


# --- starting ---


def test_a_first_start_is_opened_whatever_its_canary_says() -> None:
    story = Story().boots().ready().canary(CanaryOutcome.ERROR)
    assert story.state.phase is Phase.SERVING and said(story, OpenTraffic)


def test_a_first_start_that_said_why_and_fails_its_canary_is_not_opened() -> None:
    story = Story().boots().found().ready().canary(CanaryOutcome.ERROR)
    assert story.state.phase is Phase.CAPTURING and not said(story, OpenTraffic)


def test_a_worker_that_someone_else_put_there_must_answer_like_ours() -> None:
    story = Story().serves().tell(lambda at: Adopted(at, 2, "a:2")).ready().canary(CanaryOutcome.ERROR)
    assert story.state.phase is Phase.CAPTURING and not said(story, OpenTraffic)


def test_a_supervisor_that_lost_its_memory_gives_an_old_worker_time_to_say_that_it_is_ready() -> None:
    story = Story()
    story.at = 90_000.0
    story.boots(launched_at=100.0)
    (wait,) = said(story, Wait)
    assert wait.at >= story.at + 60.0
    story.ready(after=0.1)
    assert story.state.ready_in_s is None, "a day is no time to ready"


def test_an_adoption_holds_traffic_and_says_so_again() -> None:
    story = Story().serves().tell(lambda at: Adopted(at, 2, "a:2"))
    assert [h.generation for h in said(story, HoldTraffic)] == [1]
    assert said(story.elapses("lease", 10.0), HoldTraffic)


# --- observe ---


def test_observe_takes_the_evidence_before_it_ends_with_the_workers_code() -> None:
    story = Story(OBSERVE).serves().exits(code=3)
    assert story.state.phase is Phase.CAPTURING
    assert [f.code for f in said(story.done(Effect.CAPTURE), Finish)] == [3]


def test_observe_says_once_that_a_worker_does_not_get_ready() -> None:
    story = Story(OBSERVE).boots().elapses(after=900.0).done(Effect.CAPTURE)
    assert story.state.phase is Phase.STARTING and noted(story, "would_have_killed")
    assert story.elapses(after=900.0).state.phase is Phase.STARTING and not said(story, Note) and said(story, Wait)
    assert story.ready().canary().state.phase is Phase.SERVING, "and goes on when it does"


def test_observe_settles_what_an_earlier_supervisor_left_open() -> None:
    saved = Resume("capturing", 1, False, True, incident="0001-g1", incidents=1)
    story = Story(OBSERVE).boots(saved)
    assert story.state.phase is Phase.STARTING and [s.outcome for s in said(story, Settle)] == ["observed"]


# --- operator ---


def test_only_a_resume_clears_the_ledger_and_the_bad_rungs() -> None:
    rules = Rules(budget=Budget(3600.0, 1))
    story = Story(rules).serves().exits().recovers().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert story.state.phase is Phase.DOWN
    story.tell(ResumeOrdered)
    assert said(story, KillTree)[0].incident.endswith("-resume") and story.state.ledger == ()
    story.done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].rung == "same-again", "from the ladder's start"


def test_a_resume_relaunches_a_dead_worker_though_the_budget_is_spent() -> None:
    rules = Rules(budget=Budget(3600.0, 1))
    story = Story(rules).serves().exits().recovers().tell(PauseOrdered).exits().tell(ResumeOrdered)
    story.done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert story.state.phase is Phase.LAUNCHING


def test_what_was_found_while_paused_is_looked_into_afterwards() -> None:
    story = Story().serves().tell(PauseOrdered).found().tell(ResumeOrdered)
    assert story.state.phase is Phase.SUSPECTING and said(story, Probe)
    story = health(Story().serves().tell(PauseOrdered)).tell(ResumeOrdered)
    assert story.state.phase is Phase.SUSPECTING
    story = Story().serves().tell(PauseOrdered).found(cause=False).tell(ResumeOrdered)
    assert story.state.phase is Phase.SERVING


def test_a_launch_that_was_under_way_at_a_pause_is_awaited_after_a_resume() -> None:
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    story.tell(PauseOrdered).tell(ResumeOrdered)
    assert story.state.phase is Phase.LAUNCHING and said(story, HoldTraffic)
    assert story.done(Effect.LAUNCH).ready().canary().replayed().state.phase is Phase.SERVING
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    story.tell(PauseOrdered).tell(ResumeOrdered).elapses(after=20.0).elapses(after=5.0)
    assert (story.state.phase, story.state.generation) == (Phase.KILLING, 1)
    assert said(story, KillTree)[0].incident == "0002-resume"


def test_a_launch_that_fails_under_a_pause_leaves_the_pause_and_the_number() -> None:
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE).tell(PauseOrdered)
    story.done(Effect.LAUNCH, ok=False)
    assert (story.state.phase, story.state.generation) == (Phase.PAUSED, 1)
    assert story.saved is not None and story.saved.generation == 1
    story.tell(ResumeOrdered).done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].generation == 2


def test_a_worker_proven_while_paused_is_remembered_so() -> None:
    story = Story().boots().tell(PauseOrdered).ready().canary()
    assert story.saved is not None and story.saved.proven and story.saved.phase == "paused"
    story.exits()
    assert story.saved is not None and not story.saved.proven


def test_a_worker_that_an_earlier_supervisor_proved_need_not_say_again_that_it_is_ready() -> None:
    story = Story().boots(Resume("serving", 1, True, True, answered=True)).poisoned().tell(PauseOrdered)
    assert [p.purpose for p in said(story, Probe)] == ["prove"]
    assert story.tell(ResumeOrdered).state.phase is Phase.PROVING


def test_a_bad_flag_under_a_pause_is_told_after_the_resume() -> None:
    story = Story().boots().tell(PauseOrdered).exits(code=2)
    assert story.state.phase is Phase.PAUSED
    assert [f.code for f in said(story.tell(ResumeOrdered), Finish)] == [EXIT_CONFIG]


def test_a_resume_in_observe_only_looks() -> None:
    story = Story(OBSERVE).boots().tell(PauseOrdered).ready().tell(ResumeOrdered)
    assert story.state.phase is Phase.STARTING and [p.purpose for p in said(story, Probe)] == ["reference"]
    assert story.canary().state.phase is Phase.SERVING


# --- down, and the end ---


def test_a_supervisor_that_comes_back_down_lingers_and_leaves_if_told_to() -> None:
    saved = Resume("down", 1, False, True, incident="0001-g1", incidents=1, ledger=((50.0, "ima", "same-again"),))
    story = Story(Rules(on_spent="exit")).boots(saved, running=False)
    assert [s.outcome for s in said(story, Settle)] == ["down"], "a store that was full had kept it open"
    assert [f.code for f in said(story.elapses(after=60.0), Finish)] == [EXIT_BUDGET_SPENT]


def test_a_bad_rung_that_died_while_nobody_looked_is_remembered_too() -> None:
    saved = Resume("launching", 2, False, True, 1, "0001-g1", 1, "ima")
    story = Story().boots(saved, running=False, generation=2, code=2)
    assert story.state.phase is Phase.KILLING and story.state.bad_rungs == {"eager"}


def test_the_command_itself_is_never_a_bad_rung() -> None:
    story = REACH[Phase.LAUNCHING]().exits(code=2)
    assert story.state.bad_rungs == frozenset(), "it served before: what failed is around it"


def test_a_new_gateway_is_opened_while_only_symptoms_accuse() -> None:
    story = Story().serves().symptom().tell(lambda at: GatewayBack(at, 0, "starting"))
    assert said(story, OpenTraffic) and not said(story, PauseTraffic)
    story = Story().serves().symptom().tell(lambda at: GatewayBack(at, 1, "open"))
    assert not said(story, OpenTraffic), "what it has parked waits for the ruling"


def test_a_deadline_from_before_a_stop_says_nothing_after_it() -> None:
    story = Story().serves().exits(code=3)
    deadline = dict(story.state.waits)["phase"]
    story.tell(StopOrdered).tell(lambda at: Elapsed(at, "phase", deadline))
    assert story.state.phase is Phase.STOPPING and story.commands == []


def test_an_ordered_exit_of_the_root_is_an_exit_all_the_same() -> None:
    def gone(kind: ProcessKind) -> Story:
        return Story().serves().tell(lambda at: Exited(at, 1, 9, kind, None, 9, ordered=True, name=kind.value))

    assert gone(ProcessKind.ROOT).state.phase is Phase.CAPTURING
    assert gone(ProcessKind.ENGINE).state.phase is Phase.SERVING


def test_tokens_of_the_past_are_no_traffic_of_a_new_generation() -> None:
    story = launched_again().token()
    assert story.state.traffic_seen
    story.exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE).done(Effect.LAUNCH)
    assert not story.state.traffic_seen
    story.tell(lambda at: Progressed(at, story.state.generation - 1, at))
    assert not story.state.traffic_seen


# --- silence, Xids, orders ---


def test_silence_that_came_to_nothing_raises_no_second_suspicion_for_a_while() -> None:
    story = Story().serves().stalls().canary()
    assert story.state.phase is Phase.SERVING
    assert story.stalls().state.phase is Phase.SERVING
    assert story.stalls(after=Rules().stall_rest_s).state.phase is Phase.SUSPECTING


def test_silence_is_no_reason_to_stop_the_traffic_of_others() -> None:
    assert not said(Story().serves().stalls(), PauseTraffic)


def test_a_step_refutes_silence_and_not_a_finding_or_a_symptom() -> None:
    assert Story().serves().stalls().found().steps().state.phase is Phase.SUSPECTING
    story = Story().serves().stalls().symptom(1).steps()
    assert story.state.phase is Phase.SUSPECTING
    story.canary(CanaryOutcome.TIMEOUT)
    assert story.state.phase is Phase.SUSPECTING, "a symptom and a canary that timed out, but nothing stalls any more"


def test_a_step_from_before_the_silence_refutes_nothing() -> None:
    story = Story().serves().stalls()
    story.tell(lambda at: Progressed(at, 1, story.state.case.stalled_at - 1.0, step=True))  # type: ignore[union-attr]
    assert story.canary(CanaryOutcome.TIMEOUT).state.phase is Phase.CAPTURING


def test_a_canary_that_times_out_while_the_engine_counts_steps_is_blind() -> None:
    story = Story().serves().symptom(1).steps()
    assert story.canary(CanaryOutcome.TIMEOUT, sent=5.0).state.phase is Phase.SUSPECTING
    assert story.state.case is not None and story.state.case.canary is CanaryOutcome.BLIND


def test_silence_beside_a_503_alone_is_no_verdict() -> None:
    story = Story().serves().stalls().tell(lambda at: HealthFailed(at, 1, 503)).canary(CanaryOutcome.BLIND)
    assert story.state.phase is Phase.SUSPECTING


def test_one_xid_alone_never_kills_however_often_it_is_told() -> None:
    story = Story().serves()
    for _ in range(50):
        story.xid(31)
    assert story.state.case is not None and len(story.state.case.xids) == 1
    assert story.canary(CanaryOutcome.BLIND).elapses(after=15.0).state.phase is Phase.SERVING


def test_xids_are_bounded_at_the_limit() -> None:
    case = Case(1.0)
    for number in range(MAX_XIDS + 5):
        case = case.with_xid(GpuFault(1.0, 1, number, "0", True))
    assert len(case.xids) == MAX_XIDS


def test_a_token_after_an_xid_refutes_it() -> None:
    assert Story().serves().xid(31).token().state.phase is Phase.SERVING


def test_failing_hardware_outranks_what_the_log_says_of_the_context() -> None:
    story = Story().serves().found().xid(79, FaultClass.GPU_HARDWARE).relaunches()
    assert story.state.cause == "xid:79"
    assert not any(isinstance(c, ClearCaches) for c in story.commands), "caches are innocent of it"


def test_an_xid_that_is_heard_while_capturing_still_names_the_class() -> None:
    story = Story().serves().exits().xid(48, FaultClass.GPU_HARDWARE)
    assert story.state.case is not None and story.state.case.fault() is FaultClass.GPU_HARDWARE


def test_a_supervisor_that_is_killed_before_the_caches_are_cleared_leaves_that_to_the_next() -> None:
    for steps in ((), (Effect.CAPTURE,), (Effect.CAPTURE, Effect.KILL), (Effect.CAPTURE, Effect.KILL, Effect.GATE)):
        story = Story().serves().poisoned()
        for step in steps:
            story.done(step)
        saved = story.saved
        story.machine = Machine(story.machine.rules)
        story.boots(saved, running=False)
        if story.state.phase is Phase.CAPTURING:
            story.done(Effect.CAPTURE)
        assert story.done(Effect.KILL).done(Effect.GATE).state.phase is Phase.CLEARING, steps


def test_a_fault_class_that_we_do_not_know_any_more_is_none() -> None:
    story = Story().boots(Resume("killing", 1, True, True, 0, "0001-g1", 1, fault="made_up"), running=False)
    assert story.done(Effect.KILL).done(Effect.GATE).state.phase is Phase.LAUNCHING


def test_an_order_to_restart_is_followed_wherever_something_can_be_restarted() -> None:
    served = (Phase.STARTING, Phase.SERVING, Phase.SUSPECTING, Phase.PROVING, Phase.REPLAYING)
    for phase in (*served, Phase.DOWN, Phase.STUCK):
        story = REACH[phase]()
        story.machine.rules = Rules()  # the story that goes down has no budget at all
        story.restarts("eager")
        assert story.state.phase is Phase.KILLING and story.state.incident is not None, phase
        story.done(Effect.KILL).done(Effect.GATE)
        assert said(story, Launch)[0].rung == "eager", phase


def test_an_order_to_restart_never_ends_a_pause_and_means_nothing_while_stopping_or_observing() -> None:
    story = REACH[Phase.PAUSED]().restarts("eager")
    assert story.state.phase is Phase.PAUSED and "order_refused" in str(story.commands)
    assert REACH[Phase.STOPPING]().restarts("eager").state.phase is Phase.STOPPING
    assert Story(OBSERVE).serves().restarts().state.phase is Phase.SERVING


def test_a_rung_that_is_not_there_is_refused_and_changes_nothing() -> None:
    story = REACH[Phase.SERVING]()
    before = story.state
    assert story.restarts("no such rung").state == before
    assert "order_refused" in str(story.commands)


def test_a_launch_that_has_not_reported_back_is_waited_for_before_an_order_counts() -> None:
    story = Story().serves().exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert story.restarts("eager").state.phase is Phase.LAUNCHING
    story.done(Effect.LAUNCH).exits().done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].rung == "eager"


def test_what_worked_and_then_fails_is_forgotten() -> None:
    story = Story().boots(Resume("serving", 1, True, True, 0, worked=(("exit:root", "eager"),)))
    story.exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
    assert said(story, Launch)[0].rung == "eager"
    story.done(Effect.LAUNCH).exits(code=1)
    assert story.state.worked == ()


def test_what_worked_is_bounded_and_the_newest_is_kept() -> None:
    old = tuple((f"cause-{n}", "eager") for n in range(MAX_WORKED))
    story = Story().boots(Resume("serving", 1, True, True, 0, cause="new", worked=old)).token()
    story.elapses("probation", 120.0)
    assert len(story.state.worked) == MAX_WORKED and story.state.worked[-1] == ("new", "same-again")


def test_a_remembered_rung_that_is_spent_or_gone_leaves_the_ladder_as_it_is() -> None:
    for worked in ((("exit:root", "gone"),), (("exit:root", "eager"),)):
        ledger = ((90.0, "exit:root", "eager"), (91.0, "exit:root", "eager"))
        story = Story().boots(Resume("serving", 1, True, True, 0, ledger=ledger, worked=worked))
        story.exits().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
        assert said(story, Launch)[0].rung == "same-again", worked
