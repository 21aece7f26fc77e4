"""What survives the end of a process: copies of the tracked state.

| word | meaning |
|---|---|
| checkpoint, copy | the saved state of one step: a folder of parts, with a manifest of digests that is written last |
| part | a file of a copy: a tracked item of plain state, or what one rank holds of state that is split among ranks |
| piece | 32 MiB of a part under one digest: what one rank reads, verifies and sends at a time |
| plain, sharded | a copy with whole tensors, written by one rank; a copy of split state, each rank writes a part |
| place | where copies are; each `Place` lists its copies, opens one as a folder, and keeps the newest ones |
| rescue | a copy that a rank writes to its node's memory when it has lost a peer, right before the rank ends |
| second copy | the newest copy on another node's disk too, because the nodes share no disk |
| candidate | a copy that a rank can reach when a run is opened; `choice` puts all of them in order |
| ship | to bring the parts of the chosen copy into the memory of each node that needs them, `shipping` |
"""
