"""The protocol between the ranks: every key of the store that this program uses, who writes it, who reads it, and when.

The store is a `TCPStore`, in the process of rank 0 or, under torchrun, of the agent on node 0. That one outlives an
attempt, so everything stands in *generations*: rank 0 opens a new one each time it starts, and the others always join
the newest.

1. Before: with `--init-method file://` rank 0 sets `endpoint(token)`, so that a client knows that it found the store
   whose address is in the file, and not another one on the same port.
2. Rank 0 counts GENERATION up and sets MAIN in the new one. From now on rank 0 and the others talk by two rows of
   messages. To rank 0: each rank takes a number from MESSAGES and sets `message(number)`; the first one introduces it.
   To all others: rank 0 sets `word(number)` and counts WORDS up. Everybody waits for the next number, nobody polls, and
   what a rank sends and reads does not depend on how many there are.
3. When the roster is complete, rank 0 calls the roll, and all who are alive answer. Then rank 0 sets `member(rank)` for
   each rank, and its last word says that there is a group, or why there is none. In the second case the others confirm
   it, and rank 0, with whose process the store may end, waits for that.
4. From here on all keys stand below `members(generation)`. To try the routes each rank sets `listener(rank)`, reads its
   neighbour's, connects to it and sets `report(rank)`; rank 0 reads all reports and sets ROUTES, which all read.
5. torch forms the process group, with keys of its own in the same place.
6. While they work each rank sets `beat(rank)` twice a second, and reads the beat of the next rank now and then. Rank 0
   reads the beats of all every two seconds, for whoever asks how the run stands, and so does a rank that lost a peer
   without a reason.
7. A rank that ends sets `end(rank)`, appends itself to CAUSES if that is of its own making, sets FAILED if the others
   can't go on without it, and counts DECIDED up. For one whose process is gone the rank before it in the ring does
   that, or the process that takes its place. All ranks wait for FAILED, and then read CAUSES. Rank 0, with whose
   process the store may end, waits for DECIDED.
"""

# In the store itself
ROOT = "rankup"  # the prefix of all that follows
endpoint = "file/{}".format  # (token): only the store whose address was published with this token has it

# Below ROOT
GENERATION = "generation"  # a counter; the generation itself is a prefix, its number
members = f"{ROOT}/{{}}/group".format  # (generation): the prefix of everything that only the members of a group use

# Below a generation: joining
MAIN = "main"  # rank 0's Member as JSON
MESSAGES = "messages"  # a counter: how many numbers of messages have been taken
message = "message/{}".format  # (number): JSON: {"member"}, {"token", "call"[, "settings"]}, {"over"}, {"read"}
WORDS = "words"  # a counter: how many words rank 0 has said
word = "word/{}".format  # (number): JSON: {"call", "settings"}, {"missing"}, {"refused"} or {"group"}
member = "member/{}".format  # (rank): the Member with that rank in the group, as JSON

# Below `members`: connectivity
ROUTES = "routes"  # rank 0's conclusion, JSON: {"code", "text"}
# (rank): where it listens, JSON: {"ip", "port", "interface", "host"}, or {"code", "text"}
listener = "listener/{}".format
report = "report/{}".format  # (rank): whether it reached its neighbour, JSON: {"code", "text"}

# Below `members`: life and death
FAILED = "failed"  # an `End` as JSON, of a rank that failed: of the first, later of one that knows why
CAUSES = "causes"  # the ranks whose end is of their own making or whose process is gone, appended one a line
DECIDED = "decided"  # a counter: how many ranks have reported how they end, or are gone
# (rank): the last sign of life, JSON: {"n", "host", "phase", "step", "waiting", "for_s", "place"}
beat = "beat/{}".format
end = "end/{}".format  # (rank): how it ended, a `train.process.status.End` as JSON
