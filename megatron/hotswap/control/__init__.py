"""The protocol core: events in, decisions with reasons out. Pure: time is a parameter, nothing is sent or slept here.

The caller's whole loop (the coordinator's service and the simulator both run it):

    control = Control(config)
    while control.exit_code is None:
        event = next message of an agent, a closed connection (AgentLost), or None when the next deadline is due
        decisions = control.handle(event, now) if event else control.tick(now)
        for d in decisions:
            Send    -> put d.message on the connection of d.incarnation
            Log     -> write d to events.jsonl
"""
