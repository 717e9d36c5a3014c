"""control/loop.py: which failures are taken for the program's. The simulator has whole jobs of it, tests/unit/scenarios/loop_* stories."""

from megatron.hotswap.control.loop import STRIKES_MAX, LoopBreaker


def test_a_step_that_fails_after_two_nodes_were_replaced_for_it_is_not_the_nodes():
    loop = LoopBreaker()
    assert not loop.strike(7, ["node0"], ["node0: killed"])
    assert not loop.strike(7, ["node4"], ["node4: killed"])
    said = loop.strike(7, [], ["rank 0: out of memory"])
    assert said.startswith("step 8 failed 3 times and was never completed, so it is not the nodes; replaced for it in vain: node0, node4;")
    assert "(1) node0: killed; (2) node4: killed; (3) rank 0: out of memory" in said


def test_failures_on_the_way_back_to_a_step_are_not_its_own():
    """Of a job that goes back some steps: three accidents, of which no two are of one step."""
    loop = LoopBreaker()
    assert not loop.strike(7, ["node0"], ["node0: killed"])
    assert not loop.strike(5, ["node4"], ["node4: silent"])
    assert loop.passed(6)
    assert not loop.strike(6, [], ["rank 0: connection reset"])
    assert [strike.step for strike in loop.strikes] == [8, 7]
    assert loop.passed(8) and not loop.strikes and not loop.passed(9)


def test_nodes_that_are_lost_together_are_one_failure():
    loop = LoopBreaker()
    assert not loop.strike(7, ["node0", "node1"], ["silent", "silent"])
    assert not loop.strike(7, ["node5"], ["its connection closed"])
    assert loop.strike(7, [], ["rank 0: killed"])


def test_a_node_that_is_replaced_again_says_no_more_against_the_step():
    loop = LoopBreaker()
    assert not any(loop.strike(7, ["node0"], ["node0: killed"]) for _ in range(STRIKES_MAX))
    assert loop.strike(7, ["node0"], ["node0: killed"])


def test_the_sixth_failure_without_any_progress_ends_the_job_whichever_steps_they_are_of():
    loop = LoopBreaker()
    assert not any(loop.strike(newest, [], [f"reset after {newest}"]) for newest in (9, 8, 7, 6, 5))
    said = loop.strike(4, [], ["reset after 4"])
    assert said.startswith("steps 5, 6, 7, 8, 9, 10 failed 6 times and were never completed, so it is not the nodes; the evidence: (1)")


def test_another_coordinator_goes_on_counting():
    first, second = LoopBreaker(), LoopBreaker()
    first.strike(7, ["node0"], ["node0: killed"])
    first.strike(7, ["node1"], ["node1: killed"])
    second.take_up(first.strikes)
    assert second.strike(7, [], ["rank 0: killed"])
