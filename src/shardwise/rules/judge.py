"""Decides by execution which combinations of placements hold (see `audit.py`), in child processes that may die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..ir.placement import Partial, Placement, R, Shard
from ..ir.runner import Call, OperatorError, OpRunner
from .audit import Audited, Combination, Finding, Peer, countable, kind_of, our_combinations, plain, text_of
from .draws import Trial
from .enact import Failure, agrees, drawn, holds, in_order, shown, unwritten
from .proxy import proxy_of
from .rule import Factor, Rule
from .sandbox import ATTEMPT_TIMEOUT_S, messages
from .verify import verify_rule

PIECES = (2, 3)
SEEDS = (3,)
"""Of the inputs on which our factors are verified."""
MAX_ALONE = 8
"""So many placements of which the peer says nothing are put to it for each call."""
SMALLEST = ((2, 4, 6, 8, 10, 12, 14, 16), (4, 6, 8, 10, 12, 14, 16, 18))
"""Sizes for a minimal failing example."""
TIMEOUT_S = 6 * ATTEMPT_TIMEOUT_S

Progress = Callable[[int, int], None]


def judge_all(
    calls: Sequence[Call],
    rules: Sequence[Rule],
    runner: OpRunner,
    make_peer: Callable[[], Peer],
    progress: Progress = lambda done, total: None,
    timeout_s: float = TIMEOUT_S,
) -> list[Audited]:
    """The audit of every call, in order. One that ends its process or hangs is noted as such and left out."""
    found: dict[int, Audited] = {}

    def work(send: Callable[[object], None]) -> None:
        runner.prepare_child()
        peer = make_peer()
        for k in range(start, len(calls)):
            send((k, judge(calls[k], rules[k], runner, peer)))

    start = 0
    while start < len(calls):
        for message in messages(work, timeout_s):
            k, audited = message  # type: ignore[misc]
            found[k] = audited
            start = k + 1
            progress(start, len(calls))
        if start < len(calls):
            note = "ends its process, or hangs, while it is executed"
            found[start] = Audited(calls[start], str(rules[start]), "other", (), note)
            start += 1
            progress(start, len(calls))
    return [found[k] for k in range(len(calls))]


def judge(call: Call, rule: Rule, runner: OpRunner, peer: Peer) -> Audited:
    """All combinations that a rule or the peer allows for a call, with what execution says."""
    try:
        results = runner.meta(call)
        trials = drawn(call, runner)
    except OperatorError as error:
        return Audited(call, "", "other", (), f"no shapes: {error}"[:200])
    text, kind = text_of(rule, call, results), kind_of(rule, results)
    if not trials:
        return Audited(call, text, kind, (), "accepts no input, or does not repeat itself")
    if any(0 in meta.shape for meta in call.operands):
        return Audited(call, text, kind, (), "an operand without elements: there is nothing to compare")
    if unwritten(trials):
        return Audited(call, text, kind, (), "leaves its results unwritten: there is nothing to compare")
    ours = our_combinations(call, rule, results)
    try:
        theirs = {plain(c, results): h for c, h in peer.allows(call).items() if countable(call, c)}
        note = "" if theirs else f"{peer.name} has no rule for it"
    except Exception as error:  # a library's rule may raise anything on arguments that it does not know
        theirs, note = {}, f"{peer.name} cannot say: {type(error).__name__}: {str(error)[:120]}"
    theirs = {_matched(c, ours): h for c, h in theirs.items()}
    case = _Case(call, rule, runner, peer, trials)
    findings = [
        case.common(c, f) if c in theirs else case.only_ours(c, f)
        for c, f in ours.items()
        if c in theirs or c.sums_only
    ]
    findings += [case.only_theirs(c, help_) for c, help_ in theirs.items() if c not in ours]
    seen = {f.combination.operands for f in findings}
    silent = [p for p in _single_cuts(call) if p not in seen][:MAX_ALONE] if note == "" and peer.is_quick(call) else []
    findings += [f for p in silent if (f := case.peer_alone(p)) is not None]
    return Audited(call, text, kind, tuple(findings), note)


def _matched(combination: Combination, ours: dict[Combination, Factor | None]) -> Combination:
    """A peer's combination as we write it where it leaves the placement of a result open."""
    for other in ours:
        if other.operands == combination.operands and len(other.results) == len(combination.results):
            if all(a is None or b is None or a == b for a, b in zip(combination.results, other.results)):
                return other
    return combination


def _single_cuts(call: Call) -> list[tuple[Placement, ...]]:
    """One dim of one operand cut, all else whole: what a peer has to get right whatever its rules say."""
    found = []
    for k, meta in enumerate(call.operands):
        for d, size in enumerate(meta.shape):
            if size > 1:
                found.append(tuple(Shard(d) if o == k else R for o in range(len(call.operands))))
    return found


class _Case:
    """One call that is executed again and again."""

    def __init__(self, call: Call, rule: Rule, runner: OpRunner, peer: Peer, trials: tuple[Trial, ...]):
        self.call, self.rule, self.runner, self.peer, self.trials = call, rule, runner, peer, trials
        factors = replace(rule, linear=(), moves_data=False)
        self.errors = [e for seed in SEEDS for e in verify_rule(call, factors, runner, seed)] if rule.factors else []

    def common(self, combination: Combination, factor: Factor | None) -> Finding:
        """Both allow it."""
        return self._checked(combination, factor, "same")

    def only_ours(self, combination: Combination, factor: Factor | None) -> Finding:
        """Only we allow it."""
        return self._checked(combination, factor, "more")

    def _checked(self, combination: Combination, factor: Factor | None, verdict: str) -> Finding:
        """Ours is verified as the lowering would use it; a plain one by its pieces too."""
        if factor is None:
            failure = self._holds(combination)
            errors = [] if failure is None else [failure.reason]
        else:
            number = f"factor {self.rule.factors.index(factor)} "
            errors = [e for e in self.errors if e.startswith(number)]
        if not errors:
            # Pieces that overlap need the elements of their neighbours: a peer that cuts them plainly is wrong.
            overlaps = factor is not None and factor.halo is not None and self.peer.is_quick(self.call)
            wrong = self.peer_alone(combination.operands) if overlaps else None
            return wrong or Finding(combination, verdict)
        return Finding(combination, "conflict", f"our rule does not hold: {errors[0]}", self._our_example(combination))

    def only_theirs(self, combination: Combination, help_: str) -> Finding:
        """Only the peer lists it: it counts where its pieces hold, or its own run of it is right."""
        failure = self._holds(combination)
        if failure is None:
            return Finding(combination, "miss", help_)
        right, reason = self._peer_is_right(combination.operands)
        if right:
            return Finding(combination, "miss", f"{self.peer.name} gets it right, with help: {help_ or failure.reason}")
        if right is None:
            reason = f"{failure.reason}; {reason}"
            return Finding(combination, "unconfirmed", f"{help_}: {reason}" if help_ else reason)
        ordered = in_order(self.trials, self.runner)
        if ordered and self._peer_is_right(combination.operands, ordered)[0]:
            return Finding(combination, "unconfirmed", "right only where the operands are in order")
        example = self._peer_example(combination.operands)
        return Finding(combination, "conflict", f"{self.peer.name}: {reason}", example)

    def peer_alone(self, placements: tuple[Placement, ...]) -> Finding | None:
        """A finding where the peer accepts placements that nobody lists, and returns a wrong result."""
        right, reason = self._peer_is_right(placements, self.trials[:1])
        if right is not False:
            return None
        combination = Combination(placements, self._label(placements))
        return Finding(combination, "conflict", f"{self.peer.name}: {reason}", self._peer_example(placements))

    def _holds(self, combination: Combination) -> Failure | None:
        return holds(self.call, combination.operands, combination.results, self.runner, self.trials, PIECES)

    def _label(self, placements: tuple[Placement, ...]) -> tuple[Placement | None, ...]:
        return self.peer.runs(self.call, self.trials[0].operands, placements).placements

    def _peer_is_right(
        self, placements: tuple[Placement, ...], trials: tuple[Trial, ...] = ()
    ) -> tuple[bool | None, str]:
        """Whether the peer's own run gives the whole on all trials; None where it raises, or was not asked."""
        if not _even(self.call, placements):
            return None, "not asked for uneven pieces"
        for one in trials or self.trials:
            ran = self.peer.runs(self.call, one.operands, placements)
            if ran.error:
                return None, f"its own run raises {ran.error}"
            wrong = _first_wrong(one, ran.results, placements)
            if wrong is not None:
                return False, f"result {wrong} is labelled {ran.placements[wrong]} and is wrong"
        return True, ""

    def _small(self, shrink: tuple[int, ...]) -> tuple[Call, tuple[Trial, ...]] | None:
        small = proxy_of(self.call, self.runner, shrink)
        trials = drawn(small, self.runner) if small is not None else ()
        return (small, trials) if small is not None and trials else None

    def _peer_example(self, placements: tuple[Placement, ...]) -> str:
        """The smallest call that shows it, with whole numbers where they do."""
        for shrink in (*SMALLEST, ()):
            found = self._small(shrink) if shrink else (self.call, self.trials)
            if found is None or not _even(found[0], placements):
                continue
            call, trials = found
            for one in sorted(trials, key=lambda t: not _whole_numbers(t.operands)):
                ran = self.peer.runs(call, one.operands, placements)
                wrong = None if ran.error else _first_wrong(one, ran.results, placements)
                if wrong is not None:
                    label = f"labelled {ran.placements[wrong]}"
                    return example(call, placements, one.operands, one.results[wrong], ran.results[wrong], label)
        return ""

    def _our_example(self, combination: Combination) -> str:
        for shrink in (*SMALLEST, ()):
            found = self._small(shrink) if shrink else (self.call, self.trials)
            if found is None:
                continue
            failure = holds(found[0], combination.operands, combination.results, self.runner, found[1], PIECES)
            if failure is not None and failure.operands:
                label = failure.reason
                return example(
                    found[0], combination.operands, list(failure.operands), failure.expected, failure.got, label
                )
        return ""


def example(
    call: Call,
    placements: tuple[Placement, ...],
    operands: list[np.ndarray],
    expected: np.ndarray | None,
    got: np.ndarray | None,
    label: str,
) -> str:
    """A failing call as text: its inputs, how they lie, what was expected and what came."""
    from .proxy import format_call

    lines = [format_call(call)]
    lines += [f"  {k}: {p} of {shown(a)}" for k, (p, a) in enumerate(zip(placements, operands))]
    return "\n".join([*lines, f"  expected {shown(expected)}", f"  got      {shown(got)} ({label})"])


def _even(call: Call, placements: tuple[Placement, ...]) -> bool:
    return all(
        not isinstance(p, Shard) or (p.dim < len(m.shape) and m.shape[p.dim] % 2 == 0)
        for m, p in zip(call.operands, placements)
    )


def _whole_numbers(operands: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, np.round(a)) for a in operands if a.dtype.kind in "fc")


def _first_wrong(one: Trial, results: Sequence[np.ndarray | None], placements: tuple[Placement, ...]) -> int | None:
    """The first result that is not the whole. Summands that came in leave an error of their own size."""
    summed = any(isinstance(p, Partial) for p in placements)
    sizes = [np.asarray(float(np.abs(a).max(initial=0.0)) + 10.0) for a in one.operands if a.dtype.kind in "fc"]
    for k, (whole, got) in enumerate(zip(one.results, results)):
        if whole is None or got is None:
            continue
        if not agrees(whole, got, sizes if summed else [], Partial("sum") if summed else R):
            return k
    return None
