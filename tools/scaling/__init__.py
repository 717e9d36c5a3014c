"""The scaling study: many training jobs on one machine, each with hot-swap and without, and what both cost.

    points.py     the points of each sweep: machine, GPUs, model, TP, PP, DP, ZeRO stage, batch; which of it was published
    sites.py      the machines as Slurm's users see them: flags of sbatch, lines of shell, interface; all of it to be checked there
    commands.py   Megatron's command line of a point, the same with hot-swap and without
    checks.py     what `deadpool plan` says of a point: host memory, overlap; and whether it fits
    sweep.py      the sweep's folder: sweep.json, a folder for each point, what is done and what is not
    script.py     the batch script of a point
    places.py     how a run is started: by srun within an allocation, or on this machine
    machine.py    what a run was made on
    drive.py      the runs of a point one after the other: pairs, the kill of a node, the restart from a checkpoint
    collect.py    figures out of what the runs left behind, whole or not
    follow.py    where every point stands
    report.py    tables; plots.py the plots, with what was published

README.md beside this file says how it is used; examples/perlmutter and examples/vista go there from zero.
"""
