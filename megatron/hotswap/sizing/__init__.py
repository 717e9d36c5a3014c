"""What hot-swap costs a job, computed before it runs. Pure: sizes and speeds go in, bytes, seconds and advice come out.

    model.py    parameters of each pipeline stage, from the model's shape and its splits
    shards.py   what a rank's snapshot holds of them: DistributedOptimizer's buckets, padding and shards
    job.py      the whole job: bytes a rank, a node and a link, time against the step, what a loss may take
    advice.py   what to change where it does not hide or does not fit
    paper.py    models and machines for a table of typical jobs

docs/sizing.md explains the arithmetic; tests/unit/test_sizing_real.py compares it with models that Megatron built.
"""
