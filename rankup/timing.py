"""Every time constant of the library in one table, in seconds. Times that a user may set are options or settings
instead.

A constant that follows from another one is computed from it. Tests change a constant where it is used.
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
GATHER_S = 1.0  # newcomers of a running job that come within this are taken together
RETURN_S = 600.0  # a running job takes a node that it left out again so much later, times how often it left it out
CALL_S = 2.0  # between two calls of a leader to addresses where another one may have been started
FOUND_S = 2 * CALL_S  # at least so long a new node 0 waits to be called, before it begins a job with fewer nodes
PROBE_S = 1.0  # for the greeting of what answers at an address where a leader may be
CLAIM_S = 10.0  # for one small file in the folder that the nodes share
PREPARE_S = 300.0  # for what follows once all have come: importing torch from a busy network disk takes minutes

# Signs of life --------------------------------------------------------------------------------------------------------
ALIVE_S = 1.0  # between two signs of life
SILENT_S = 30.0  # without a sign of life; a machine with too much to do may look dead for a while
FROZEN_S = 5.0  # between two looks at the clock: this process was stopped itself, and knows nothing of the others
BUSY_S = 3.0  # a leader that was silent for so long may only be busy
ENDING_S = 0.5  # a member that was not reached may be ending, which its connection to the leader says in a moment

# Leaving --------------------------------------------------------------------------------------------------------------
DECIDE_S = 1.0  # for a comparison of states that may show that this rank's is wrong, before it is rescued
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

# The group of ranks --------------------------------------------------------------------------------------------------
STOP_S = 0.001  # between two looks at whether a step may begin, while the ranks agree on one to stop at
FORM_S = 20.0  # ranks that reach each other connect within this; more where there are many
WATCHDOG_LATER_S = 10.0  # each step of joining has its own deadline, whose message says more than the watchdog's
TORCH_S = 14 * 24 * 3600.0  # gloo's and nccl's own timeouts come after all of ours, which know phase and rank
WHERE_S = 2.0  # how long the leader may take to say where all ranks are
QUIET_S = 5.0  # a rank of which nothing was heard for so long may be stopped, or cut off
CAUSE_S = 7.0  # how long the line has to say who was lost, where a collective has broken
# How long the loop gets to notice by itself that another rank's process is gone. It does so within milliseconds where a
# collective of gloo breaks. NCCL's do not break, nor does one whose other side is a third rank that is alive.
GONE_S = 0.05
# The same where the other rank ended with an error. The loop may be about to raise that error too (a mistake of the
# user shows on all ranks), and then says more about it than this rank's end for a lost peer would.
FAILED_S = 10.0
FAILED_WAITING_S = 1.0  # in a collective
LINGER_S = 2.0  # of a rank whose deadline has passed: the others write where they stand before it ends them
STACKS_S = 5.0  # for the stacks: the disk of the run may be the very thing that hangs
REPORT_END_S = 5.0  # for the report of an end: the store may hang too, or be in use by the thread that hangs
LEAVING_S = 30.0  # for a rank that failed, to find the cause, to report it and to leave
# How long after a deadline the kernel ends the process: for a hang that holds the interpreter's lock, so that no thread
# of ours runs. Long, as the thread that ends it properly may need most of CAUSE_S + REPORT_END_S on a busy machine
LOCKED_GRACE_S = 60.0

# The end of a rank ----------------------------------------------------------------------------------------------------
# Keeps a victim from being named the root cause: torchrun's summary takes the earliest time, which has whole seconds,
# then the lowest rank; and for a rank that left no file the time at which the others had ended.
VICTIM_LATER_S = 3
PARTING_S = 3.0  # for the last lines of a rank that was asked to leave: a full pipe or a stuck disk must not keep it

# What is printed ------------------------------------------------------------------------------------------------------
PRINT_S = 5.0  # a reader that does not read holds up who prints: after that lines are dropped until it reads again

# Copies of the state --------------------------------------------------------------------------------------------------
HURRY_S = 3.0  # for parts of a copy that are nearly done, when a rank was lost
VISIBLE_S = 10.0  # NFS caches directories: a node may see another node's new file this much later
SHARE = 0.005  # no seconds but a share of the time: for comparisons of states, and for parts in memory
ABANDONED_S = 7 * 24 * 3600.0  # what no run went on with for so long is removed from memory

# Places ---------------------------------------------------------------------------------------------------------------
LOCK_S = 4.0  # rank 0 of a killed attempt may take this long to end, and holds its lock until then
REQUEST_S = 60.0  # for one small request: a frozen store, or a firewall, never answers at all
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a store is asked again
FIND_S = 5.0  # for a mirror at opening, where a run is here that may go on without it
# At the end the other ranks wait for rank 0, and a launcher that stops a job gives a minute or less
UPLOAD_END_S, UPLOAD_STOP_S = 60.0, 15.0

# Looking at a run -----------------------------------------------------------------------------------------------------
LAST_REPORT_S = 1.0  # how long the end of an attempt may wait for the last report: a disk may hang
RUN_SILENT_S = 5 * REPORT_S  # a network file system shows another machine's writes some seconds later
NOW_S = 5.0  # younger signs of life are "now"
LONG_S = 10.0  # in one step, or in a phase without steps: worth a word
FOLLOW_S = 1.0  # between two looks at logs that are followed: equal lines of several ranks have come by then, mostly
# Equal lines so many seconds apart are still one: clocks differ, and one rank writes at the end of a second what
# another writes at the beginning of the next
SAME_S = 2
ANSWER_STACKS_S = (2.0, 3.0)  # for each of two signals: a thread of Python needs its turn on a busy machine
ANSWER_TICK_S = 0.05  # between two looks for the answer

# Trackers -------------------------------------------------------------------------------------------------------------
# How long rank 0 waits for the last values to be sent. A run that is stopped may have few seconds until it is killed:
# its sender goes on alone, if it can
TRACKER_S = {"finished": 32.0, "stopped": 4.0, "failed": 0.0}
SENDER_LOOK_S = 2.0  # between two looks into the run directory
SENDER_PAUSE_S = 10.0  # between two attempts to reach a server that does not answer
SENDER_END_S = 30  # how long the sender may go on once it knows that rank 0 has ended
