"""`srun python pretrain_gpt.py --hot-swap …`: a task works its place in the job out of what Slurm tells it (layout.py) and becomes an
agent (task.py). One task also keeps the coordinator (keeper.py), and tells the others in the run directory where that is."""
