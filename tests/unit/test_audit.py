"""The audit of rules: verdicts by execution against a scripted peer, and against DTensor itself on chosen calls."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pytest

from shardwise import cli
from shardwise.errors import InputError
from shardwise.ir.graph import Ref
from shardwise.ir.placement import Partial, Placement, R, Shard
from shardwise.ir.runner import Call, OperatorError, TensorMeta
from shardwise.pytorch.dtensor import DTensorPeer, peer_name
from shardwise.pytorch.samples import check_names, matching, sample_calls
from shardwise.report.audit import audit_data, audit_lines, audit_page
from shardwise.rules.audit import Audited, Combination, Ran, Report, category, kind_of, our_combinations
from shardwise.rules.book import RuleBook
from shardwise.rules.enact import drawn, holds
from shardwise.rules.judge import judge, judge_all
from shardwise.rules.rule import DimRef, Factor, Rule
from tests.graphs import RUNNER
from tests.unit.test_cli import run

A, B, C = (Ref(str(k)) for k in range(3))
SUM = Partial("sum")


def f(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float64")


def i(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "int64")


MM = Call("aten.mm.default", (f(6, 12), f(12, 18)), (A, B))
CONV = Call(
    "aten.convolution.default", (f(2, 4, 6, 6), f(6, 4, 3, 3)), (A, B, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
)
CUMSUM = Call("aten.cumsum.default", (f(6, 12),), (A, 1))
EXP = Call("aten.exp.default", (f(6, 12),), (A,))
RELU = Call("aten.relu.default", (f(6, 12),), (A,))
EMBEDDING = Call("aten.embedding.default", (f(12, 6), i(6, 18)), (A, B))
VIEW = Call("aten.view.default", (f(6, 12),), (A, (72,)))


@lru_cache
def _rules() -> dict[Call, Rule]:
    calls = [MM, CONV, CUMSUM, EXP, RELU, EMBEDDING, VIEW]
    return dict(zip(calls, RuleBook(RUNNER, use_disk=False, use_shipped=False).find(calls)))


class Scripted:
    """A peer that lists what it is told to, and whose runs give the whole, something else, or an error."""

    name = "the peer"

    def __init__(self, lists: tuple[Combination, ...] = (), answer: str = "error"):
        self.lists, self.answer = lists, answer

    def allows(self, call: Call) -> dict[Combination, str]:
        return dict.fromkeys(self.lists, "")

    def is_quick(self, call: Call) -> bool:
        return True

    def runs(self, call: Call, operands: list[np.ndarray], placements: tuple[Placement, ...]) -> Ran:
        if self.answer == "error":
            return Ran(error="RuntimeError: no")
        whole = RUNNER.run(call, operands)
        wrong = [None if w is None else w + 1 for w in whole]
        return Ran(tuple(whole if self.answer == "right" else wrong), (R,) * len(whole))


def _verdicts(audited: Audited) -> dict[str, str]:
    return {str(x.combination): x.verdict for x in audited.findings}


@pytest.mark.parametrize(
    ("rule", "lists", "answer", "want"),
    [
        (None, ((Shard(0), R),), "error", "same"),
        (None, (), "error", "more"),
        (Rule(), ((Shard(0), R),), "error", "miss"),
    ],
)
def test_a_combination_that_holds(rule, lists, answer, want):
    listed = tuple(Combination(operands, (Shard(0),)) for operands in lists)
    found = judge(MM, _rules()[MM] if rule is None else rule, RUNNER, Scripted(listed, answer))
    assert _verdicts(found)["(S0, R) -> (S0)"] == want


@pytest.mark.parametrize(("answer", "want"), [("error", "unconfirmed"), ("right", "miss"), ("wrong", "conflict")])
def test_a_combination_that_does_not_hold_hangs_on_the_peers_own_run(answer, want):
    wrong = Combination((Shard(1), Shard(0)), (R,))
    found = judge(MM, Rule(), RUNNER, Scripted((wrong,), answer))
    finding = next(x for x in found.findings if x.combination == wrong)
    assert finding.verdict == want and finding.reason
    assert bool(finding.example) == (want == "conflict")


def test_a_wrong_rule_of_ours_is_a_conflict_with_an_example():
    wrong = Factor((DimRef(1), DimRef(0)), ("max",))
    found = judge(MM, Rule((wrong,)), RUNNER, Scripted())
    (finding,) = [x for x in found.findings if x.combination == Combination((Shard(1), Shard(0)), (Partial("max"),))]
    assert finding.verdict == "conflict" and "our rule does not hold" in finding.reason
    assert "aten.mm.default(0, 1) on float64[2,4], float64[4,6]" in finding.example
    assert "expected" in finding.example and "got" in finding.example
    assert category([found]) == "conflict"


def test_a_wrong_linear_group_of_ours_is_a_conflict():
    found = judge(RELU, Rule((), ((0,),)), RUNNER, Scripted())
    assert _verdicts(found)["(Psum) -> (Psum)"] == "conflict"


def test_a_peer_that_returns_nonsense_where_it_lists_nothing_is_found():
    found = judge(MM, _rules()[MM], RUNNER, Scripted((Combination((Shard(0), R), (Shard(0),)),), "wrong"))
    assert any(x.verdict == "conflict" and x.combination.operands == (Shard(1), R) for x in found.findings)


def test_placements_that_are_not_compared():
    scalar = Call("aten.mul.Tensor", (f(6, 1), i(6, 1)), (A, B))
    rule = Rule((Factor((DimRef(1), DimRef(1)), (DimRef(1),)), Factor((None, None), (DimRef(0),))), ((1,), (0,)))
    assert [str(c) for c in our_combinations(scalar, rule, (f(6, 1),)) if c.sums_only] == ["(Psum, R) -> (Psum)"]


def test_a_factor_inside_a_dim_is_a_plain_cut_only_where_it_is_outermost():
    rule = _rules()[VIEW]
    assert {str(c) for c in our_combinations(VIEW, rule, (f(72),)) if c.sums_only} == {
        "(S0) -> (S0)", "(S1) -> (S0(6,1))", "(Psum) -> (Psum)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "operands", "results", "good"),
    [
        (MM, (Shard(1), Shard(0)), (SUM,), True),
        (MM, (SUM, R), (SUM,), True),
        (MM, (SUM, SUM), (SUM,), False),
        (MM, (Shard(0), R), (Shard(1),), False),
        (MM, (Shard(1), R), (SUM,), False),
        (MM, (Partial("max"), R), (Partial("max"),), False),
        (CUMSUM, (Shard(1),), (Shard(1),), False),
        (CUMSUM, (Shard(0),), (Shard(0),), True),
        (CUMSUM, (Partial("avg"),), (Partial("avg"),), True),
        (EXP, (Partial("max"),), (Partial("max"),), True),
        (EXP, (Partial("min"),), (Partial("min"),), True),
        (EXP, (SUM,), (SUM,), False),
        (VIEW, (Shard(0),), (Shard(0),), True),
        (VIEW, (Shard(1),), (Shard(0),), False),
    ],
)
def test_execution(call, operands, results, good):
    failure = holds(call, operands, results, RUNNER, drawn(call, RUNNER), (2, 3))
    assert (failure is None) == good


def test_what_ends_the_process_is_noted_and_the_rest_goes_on():
    class Deadly(Scripted):
        def allows(self, call: Call) -> dict[Combination, str]:
            if call == CUMSUM:
                import os

                os._exit(1)
            return {}

    calls = [EXP, CUMSUM, RELU]
    found = judge_all(calls, [_rules()[c] for c in calls], RUNNER, Deadly)
    assert [bool(a.note.startswith("ends its process")) for a in found] == [False, True, False]
    assert [a.call for a in found] == calls and found[2].findings


def test_a_call_that_no_shape_function_accepts_is_noted():
    broken = Call("aten.mm.default", (f(2, 3), f(2, 3)), (A, B))
    with pytest.raises(OperatorError):
        RUNNER.meta(broken)
    assert "no shapes" in judge(broken, Rule(), RUNNER, Scripted()).note


def test_truth_values_have_one_word_for_each_reduction():
    call = Call("aten.any.dim", (f(6, 12),), (A, 1))
    listed = Combination((Shard(1),), (SUM,))
    rule = Rule((Factor((DimRef(1),), ("max",)),))
    found = judge(call, rule, RUNNER, Scripted((listed,)))
    assert _verdicts(found) == {"(S1) -> (Pmax)": "same"}


def test_truth_of_summands_is_not_the_truth_of_the_sum():
    call = Call("aten.any.default", (f(6, 12),), (A,))
    assert holds(call, (SUM,), (Partial("max"),), RUNNER, drawn(call, RUNNER), (2,)) is not None


def test_what_holds_in_order_only_is_no_conflict():
    class Sorted(Scripted):
        """Right where the boundaries are in order, as they have to be."""

        def runs(self, call: Call, operands: list[np.ndarray], placements: tuple[Placement, ...]) -> Ran:
            good = bool((np.diff(operands[1]) >= 0).all())
            whole = RUNNER.run(call, operands)
            return Ran(tuple(w if good or w is None else w + 1 for w in whole), (SUM,))

    call = Call("aten.bucketize.Tensor", (f(6), f(12)), (A, B))
    found = judge(call, Rule(), RUNNER, Sorted((Combination((R, Shard(0)), (SUM,)),)))
    (finding,) = [x for x in found.findings if x.combination.operands == (R, Shard(0))]
    assert (finding.verdict, finding.reason) == ("unconfirmed", "right only where the operands are in order")


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (Call("aten.empty_like.default", (f(6, 12),), (A,)), "leaves its results unwritten"),
        (Call("aten.exp.default", (f(6, 0),), (A,)), "without elements"),
    ],
)
def test_where_there_is_nothing_to_compare(call, note):
    found = judge(call, Rule((Factor((DimRef(0),), (DimRef(0),)),)), RUNNER, Scripted())
    assert note in found.note and not found.findings


@pytest.mark.parametrize(
    ("call", "kind"),
    [(MM, "contraction"), (EXP, "elementwise"), (VIEW, "view"), (EMBEDDING, "index"), (CUMSUM, "other")],
)
def test_kinds(call, kind):
    assert kind_of(_rules()[call], RUNNER.meta(call)) == kind


@lru_cache
def _against_dtensor() -> dict[str, Audited]:
    calls = [MM, CONV, CUMSUM, EXP, RELU, EMBEDDING]
    found = judge_all(calls, [_rules()[c] for c in calls], RUNNER, DTensorPeer)
    return {a.call.op.split(".")[1]: a for a in found}


def test_dtensor_and_ours_agree_on_products_and_scans():
    found = _against_dtensor()
    product = _verdicts(found["mm"])
    assert {c for c, v in product.items() if v == "same"} >= {
        "(S0, R) -> (S0)", "(R, S1) -> (S1)", "(S1, S0) -> (Psum)", "(Psum, R) -> (Psum)",
    }  # fmt: skip
    assert category([found["mm"]]) == "same"
    assert _verdicts(found["cumsum"])["(S0) -> (S0)"] == "same" and "(S1) -> (S1)" not in _verdicts(found["cumsum"])


def test_dtensor_shifts_and_masks_the_indices_of_a_cut_table_as_we_do():
    assert _verdicts(_against_dtensor()["embedding"])["(S0, R) -> (Psum)"] == "same"


def test_dtensor_lets_maxima_pass_through_what_is_monotone():
    found = _verdicts(_against_dtensor()["relu"])
    assert found["(S0) -> (S0)"] == "same" and found["(Pmax) -> (Pmax)"] == "miss"


def test_a_convolution_cut_in_space_is_wrong_in_dtensor():
    conv = _against_dtensor()["convolution"]
    wrong = [x for x in conv.findings if x.verdict == "conflict"]
    assert {x.combination.operands for x in wrong} >= {(Shard(2), R), (Shard(3), R)}
    assert all(peer_name() in x.reason for x in wrong)
    example = next(x.example for x in wrong if x.combination.operands == (Shard(3), R))
    assert "expected" in example and "S3 of" in example
    assert _verdicts(conv)["(S0, R) -> (S0)"] == "same" and _verdicts(conv)["(S1, S1) -> (Psum)"] == "more"
    assert category([conv]) == "conflict"


def test_recall_counts_what_execution_confirms():
    report = Report("DTensor", list(_against_dtensor().values()))
    assert report.recall == 1.0, "conflicts and what is not confirmed do not count"
    assert report.recall_of_all is not None and report.recall_of_all < 1.0, "maxima that come in"


def test_a_report_in_every_form():
    report = Report("DTensor", list(_against_dtensor().values()))
    data = json.loads(json.dumps(audit_data(report)))
    assert {o["operator"]: o["category"] for o in data["operators"]}["aten.mm.default"] == "same"
    text = "\n".join(audit_lines(report))
    assert "conflict  aten.convolution.default (S3, R)" in text and "100.00%" in text
    page = audit_page(report, "shardwise audit")
    assert "| contraction |" in page and "**aten.convolution.default** (S3, R)" in page


@pytest.mark.parametrize("name", ["mm", "aten.mm", "mm.default", "aten.mm.default"])
def test_names_of_operators(name):
    assert matching(name, ["aten.mm.default", "aten.addmm.default", "aten.mm.out"])[0] == "aten.mm.default"


def test_an_unknown_operator_is_refused_with_close_names():
    with pytest.raises(InputError, match=r"'aten.mmm' is no operator of torch; close: .*mm"):
        check_names(["mm", "aten.mmm"])


def test_an_operator_without_samples_is_refused():
    with pytest.raises(InputError, match="no samples of relu_ "):
        sample_calls(["relu_"], RUNNER, entries=[])


def test_the_command(monkeypatch, capfd, tmp_path):
    page = tmp_path / "audit.md"
    code, text, _ = run(monkeypatch, capfd, "audit", "t", "--calls", "1", "--json", "--write", page)
    data = json.loads(text)
    assert code == 0 and {o["operator"] for o in data["operators"]} == {"aten.t.default"}
    assert {x["verdict"] for o in data["operators"] for c in o["calls"] for x in c["findings"]} >= {"same"}
    assert data["recall"] == 1.0
    assert "shardwise audit t --calls 1" in page.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no_such_operator"], "is no operator of torch"),
        (["mm", "--write", "/nowhere/audit.md"], "No such file or directory"),
    ],
)
def test_the_command_refuses(monkeypatch, capfd, argv, message):
    monkeypatch.setattr(cli, "audit_rules", _only_names)
    code, text, error = run(monkeypatch, capfd, "audit", *argv)
    assert code == 1 and text == "" and message in " ".join(error.split()) and "Traceback" not in error


def _only_names(operators, calls_each, progress):
    check_names(operators)
    return Report("DTensor")
