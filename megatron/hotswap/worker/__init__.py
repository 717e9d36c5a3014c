"""Inside the training process: the session with the agent, the halt, the recovery loop, the spare's start."""
