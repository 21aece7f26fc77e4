"""All time constants of the library, in seconds. Times that a user may want to change are options or settings instead.

A constant that depends on another one is computed from it. Tests patch a constant in the module that uses it.
"""

# Looking --------------------------------------------------------------------------------------------------------------
ADOPTED_S = 0.001  # between two looks of a new process whether the agent has inherited it
POLL_S = 0.01  # between two checks of a process on this machine; each takes a microsecond
PAUSE_S = 0.1  # between two attempts to open a port or to connect
TICK_S = 0.25  # between two checks of deadlines and of silent members
REPORT_S = 2.0  # between two reports on the progress of a run
NOTICE_S = 10.0  # between two log lines that say what an agent waits for

# Meeting --------------------------------------------------------------------------------------------------------------
CONNECT_S = 2.0  # for the resolver, and for each address that it returns; TCP repeats a lost packet after a second
HELLO_S = 5.0  # for the first message after a connection; port scanners send none
EARLY_PAUSE_S = 0.01  # the same at first, while all members start; then longer and longer, up to PAUSE_S
ROUTE_S = 4.0  # for testing the route to the next member: TCP repeats a packet that a firewall drops after 1 s and 3 s
PORT_S = 5.0  # how long an ending process of an earlier job may still hold the port
GATHER_S = 1.0  # newcomers that reach a running job within this time are admitted together
RETURN_S = 600.0  # pause before a running job readmits a node that it left out, times how often it left the node out
# A node that is lost again and again, each time soon after it came, waits before a running job readmits it: not after
# the first losses, then this long, and twice as long each time, up to RETURN_S
FREE_LOSSES, BACK_OFF_S = 3, 15.0
CALL_S = 2.0  # between two calls of a leader to addresses at which another leader may have been started
FOUND_S = 2 * CALL_S  # minimum wait of a new node 0 for another leader's call, before it begins with fewer nodes
PROBE_S = 1.0  # for the greeting of a process that may be a leader
CLAIM_S = 10.0  # for one small file in the folder that the nodes share
PREPARE_S = 300.0  # for preparing after all members have come: importing torch from a busy network disk takes minutes

# What operators ask ---------------------------------------------------------------------------------------------------
ON_END_S = 60.0  # for the command at the end of a job
ON_REQUEUE_S = 20.0  # the same where Slurm or torchrun kills all processes after 30 s
LAST_ACT_S = 25.0  # for that command and the files that it is told of, in a rank without an agent
CHECK_S = 120.0  # for the check whether a node is fit
CHECK_AGAIN_S = 5.0  # between two checks of a node that is not fit
FEED_S = 30.0  # between two reports to the controller of a TrainJob
SPOT_S = 5.0  # between two questions to a metadata server; AWS recommends 5 s, and gives two minutes

# Heartbeats --------------------------------------------------------------------------------------------------------
ALIVE_S = 1.0  # between two heartbeats
SILENT_S = 30.0  # a member is lost after this long without a heartbeat; an overloaded machine may look dead before
FROZEN_S = 5.0  # a gap this long in a loop means that this process itself was stopped, and heard nothing of the others
BUSY_S = 3.0  # a leader that is silent no longer than this may only be busy
ENDING_S = 0.5  # a member that cannot be reached may be ending, which the leader learns within this time

# Leaving --------------------------------------------------------------------------------------------------------------
DECIDE_S = 1.0  # before this rank's state is rescued, for a comparison that may show that the state is wrong
LAST_MESSAGE_S = 2.0  # for the last messages of an ending process, or of a peer that may be gone
SAY_S = 2.0  # for a message to the agent, because a stopped agent reads nothing
HEALTHY_S = 600.0  # an unchanged script that ran this long before its node was lost is healthy; kubelet's figure
UNNOTICED_S = 2.0  # ranks notice a lost peer within a second; a rank that waits for it to join is told after this time
LEAVE_S = 15.0  # after one rank has ended, all others must end within this time of their last progress with a rescue
TURN_S = 4.0  # if the rank that writes its node's rescue writes nothing for this long, another rank writes one
SCRIPT_LEAVE_S = 5.0  # the same for a script that does not import rankup: it has only its own state to write
REACH_S = 5.0  # for reaching the step at which all ranks stop; a rank that waits for data, or evaluates, will not
# torchrun passes a signal on to ranks that may have got it already, within milliseconds. Slurm and Kubernetes repeat a
# signal later. A signal that comes again after this time is meant as a second one, and the process leaves at once
REPEAT_S = 5.0
FAREWELL_S = 5.0  # how long the leader stays, so that the other members hear how the job ends
KILL_S = 5.0  # for the end of a killed process; a process that waits for a dead disk ends only when the disk answers

# The group of ranks --------------------------------------------------------------------------------------------------
STOP_S = 0.001  # between two checks whether a step may begin, while the ranks agree on a step to stop at
FORM_S = 20.0  # for connecting ranks that can reach each other; many ranks get more
WATCHDOG_LATER_S = 10.0  # added for the watchdog while joining: each step's own deadline has a better message
TORCH_S = 14 * 24 * 3600.0  # timeout of gloo and NCCL, longer than all of ours, whose messages name phase and rank
UNEVEN_S = 3.0  # how long a rank waits at the end of its batches before it asks whether another rank has more
WHERE_S = 2.0  # how long the leader may take to say where all ranks are
QUIET_S = 5.0  # a rank that was silent for this long may be stopped, or cut off
CAUSE_S = 7.0  # after a collective broke: for the message that names the lost rank
# How long the loop gets to notice by itself that another rank's process is gone. A gloo collective with that rank
# breaks within milliseconds. NCCL's collectives do not break, nor does a collective with a third rank that is alive.
GONE_S = 0.05
# The same if the other rank ended with an error. The loop may be about to raise that error too, because a user's
# mistake shows on all ranks. Its own error then says more than the loss of a peer would.
FAILED_S = 10.0
FAILED_WAITING_S = 1.0  # the same while the loop is in a collective
LINGER_S = 2.0  # a rank whose deadline has passed stays this long, so that the other ranks can write their stacks
STACKS_S = 5.0  # for writing the stacks: the disk of the run may be the very thing that hangs
REPORT_END_S = 5.0  # for the report of an end: the store may hang too, or be in use by the thread that hangs
LEAVING_S = 30.0  # for a failed rank to find the cause, to report it and to leave
# How long after a deadline the kernel ends the process, in case a hang holds the GIL and none of our threads can run.
# It is long because the thread that ends the process may need most of CAUSE_S + REPORT_END_S on a busy machine
LOCKED_GRACE_S = 60.0

# The end of a rank ----------------------------------------------------------------------------------------------------
# Added to a victim's time, so that torchrun's summary does not name it the root cause. The summary takes the earliest
# time, in whole seconds, then the lowest rank. A rank without an error file gets the time when all had ended.
VICTIM_LATER_S = 3
PARTING_S = 3.0  # for the last lines of a rank that was asked to leave, in case a full pipe or a stuck disk blocks it

# What is printed ------------------------------------------------------------------------------------------------------
PRINT_S = 5.0  # how long a reader that does not read may block printing; then lines are dropped until it reads again

# Copies of the state --------------------------------------------------------------------------------------------------
HURRY_S = 3.0  # after a rank was lost: for parts of a copy that are nearly written
VISIBLE_S = 10.0  # NFS caches directories: a node may see another node's new file this much later
SHARE = 0.005  # a share of the training time, not seconds: for comparing states, and for writing parts to memory
ABANDONED_S = 7 * 24 * 3600.0  # parts in memory that no run has resumed from for this long are removed

# Places ---------------------------------------------------------------------------------------------------------------
LOCK_S = 4.0  # rank 0 of a killed attempt may take this long to end, and holds its lock until then
REQUEST_S = 60.0  # for one small request, because a frozen store or a firewall never answers
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a failed request to a store is repeated
FIND_S = 5.0  # for a mirror to answer at the start, if the run exists here and can continue without the mirror
# For the last uploads. The other ranks wait for rank 0 at the end, and a launcher stops a job within a minute or less
UPLOAD_END_S, UPLOAD_STOP_S = 60.0, 15.0

# Looking at a run -----------------------------------------------------------------------------------------------------
LAST_REPORT_S = 1.0  # for the last report of an attempt, whose disk may hang
RUN_SILENT_S = 5 * REPORT_S  # a run is silent after this; a network disk shows another machine's writes seconds late
NOW_S = 5.0  # a younger heartbeat is shown as "now"
LONG_S = 10.0  # a step, or a phase without steps, that takes longer is mentioned
FOLLOW_S = 1.0  # between two reads of logs that are followed; equal lines of several ranks mostly come within this time
# Equal lines that are at most this many seconds apart are shown as one. Clocks differ, and one rank may write at the
# end of a second what another rank writes at the beginning of the next
SAME_S = 2
ANSWER_STACKS_S = (2.0, 3.0)  # for the answer to each of two signals: on a busy machine a Python thread must wait
ANSWER_TICK_S = 0.05  # between two checks for the answer

# Trackers -------------------------------------------------------------------------------------------------------------
# How long rank 0 waits for the last values to be sent. A run that is stopped may be killed within seconds, so its
# sender process continues alone if it can
TRACKER_S = {"finished": 32.0, "stopped": 4.0, "failed": 0.0}
SENDER_LOOK_S = 2.0  # between two checks of the run directory
SENDER_PAUSE_S = 10.0  # between two attempts to reach a server that does not answer
SENDER_END_S = 30  # how long the sender may continue after it knows that rank 0 has ended
