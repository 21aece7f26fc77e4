"""Every time constant of the library in one table, in seconds. What a user may set is an option or a setting instead.
rankup/agent/record.py has those of the health check, as it also runs alone.

A constant that follows from another one is written as that. Tests change a constant where it is used.
"""

# Looking --------------------------------------------------------------------------------------------------------------
POLL_S = 0.01  # between two looks at a process of this machine; each takes a microsecond
PAUSE_S = 0.1  # between two tries to open a port or to connect
TICK_S = 0.25  # between two looks at deadlines and at silent members
REPORT_S = 2.0  # between two reports of how a run goes
NOTICE_S = 10.0  # between two lines that say what is waited for

# Meeting --------------------------------------------------------------------------------------------------------------
CONNECT_S = 2.0  # for the resolver, and for each address that it names; a lost packet is sent again after a second
HELLO_S = 5.0  # for the first message of the other side; port scanners send none
EARLY_S, EARLY_PAUSE_S = 3.0, 0.01  # all members start within seconds: so long they try to connect so often
ROUTE_S = 4.0  # for the route to the next member: a packet that a firewall drops is sent again after 1 s and 3 s
PORT_S = 5.0  # how long the end of an earlier job's process may take to free the port
PREPARE_S = 300.0  # for the leader's side of a commit: importing torch from a busy network disk takes minutes

# Signs of life --------------------------------------------------------------------------------------------------------
ALIVE_S = 1.0  # between two signs of life
SILENT_S = 30.0  # without a sign of life; a machine with too much to do may look dead for a while
FROZEN_S = 5.0  # between two looks at the clock: this process was stopped itself, and knows nothing of the others
BUSY_S = 3.0  # a leader that was silent for so long may only be busy
# A machine that lost its power holds its connection for long, and its successor waits: so long without a sign of life
ANSWER_S = ALIVE_S + 1.5
ENDING_S = 0.5  # a member that was not reached may be ending, which its connection to the leader says in a moment
STOPPED_S = 10.0  # a rank in state T (SIGSTOP) answers nobody

# Leaving --------------------------------------------------------------------------------------------------------------
LAST_WORD_S = 2.0  # for what a process that ends, or a peer that may be gone, still has to say
SAY_S = 2.0  # how long a message to the agent may take: one that is stopped reads nothing
UNNOTICED_S = 2.0  # ranks notice within a second that a peer is gone; one that waits for it to join is told after this
LEAVE_S = 15.0  # the ranks of a job end together: after one has ended, the rest have this long
SCRIPT_LEAVE_S = 5.0  # the same for a script that knows nothing of us: it has only its own state to write
REACH_S = 5.0  # from the agreement on a step to stop at: a rank that waits for data, or evaluates, does not come there
# torchrun passes each signal on to ranks that may have got it already, within milliseconds. Slurm and Kubernetes repeat
# theirs later: a signal that comes again after so long is meant, and the process leaves at once
REPEAT_S = 5.0
FAREWELL_S = 5.0  # how long the leader stays for the others to hear how the job ends
KILL_S = 5.0  # how long a killed process may take to end; one that waits for a dead disk ends when the disk answers

# The end of a rank ----------------------------------------------------------------------------------------------------
DUMP_S = 2.0  # before the kernel's deadline: the thread that dumps the stacks needs its turn on a busy machine
PARTING_S = 3.0  # for the last lines of a rank that was asked to leave: a full pipe or a stuck disk must not keep it
