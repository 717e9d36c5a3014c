"""A long job under failures, by five ways to survive them. Pure: rates, costs and a random source go in, seconds come out.

    inputs.py      the job, its failures and the costs; defaults, each with its source or marked as assumed
    failures.py    when which nodes fail and how long each is repaired: one trace for all schemes, so that they are compared on it
    schemes.py     checkpoint-restart, in-memory checkpoints, exclude-and-run, in-process restart, hot swap, as values
    stretch.py     how far training comes in a stretch without failures: arithmetic, so that no step is simulated
    pools.py       who trains: lost positions filled from spares, or left out
    engine.py      the event loop: one job, one scheme, one trace
    theory.py      closed forms: Young, Daly, expected wall time, nodes in repair, spares
    study.py       many seeds: means with confidence intervals, the best interval, spares, sensitivity
    published.py   the paper's figures, and what must be assumed to meet them

    trace = Trace(inputs, random.Random(seed))
    outcomes = [run(inputs, scheme, trace) for scheme in all_schemes(inputs)]

docs/simulate.md explains the model and its assumptions; tests/unit/test_simulate*.py compare it with the closed forms.
"""
