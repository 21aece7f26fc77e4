"""The commands of the program, and the options that are no settings of a training. No torch here."""

from train.config.load import Extra

COMMANDS = {
    "train": "Train; the same command again goes on where it stopped.",
    "evaluate": "Evaluate a checkpoint on the test data, exactly, with any number of processes.",
    "predict": "Write input, label and probability of each sample to a CSV or JSONL file.",
    "export": "Write the weights of a checkpoint, plain or sharded, to one file.",
    "show": "Print all settings as they would be used, with help, range and unit.",
    "doctor": "Is this machine, and this group of machines, fit to train? Ends with 0, 10 (warnings), 20 (not fit) or 30.",
    "explain": "Say which known fault the log of a failed job shows, on which rank, and what to do. Ends with 0 or 20.",
    "compare": "Train with each method and launcher that can run here, several times, and set them side by side.",
    "bench": "Measure how fast the ranks exchange, and what that means for the model in the settings.",
    "launch": "Start several processes of `train` on this node; keeps exit codes, restarts what it helps.",
}
EXTRA = {
    "log": Extra(str, "", "The log of a failed job, a run's directory, or - for standard input.", ("explain",),
                 metavar="FILE"),
    "nproc": Extra(int, 1, "Processes on this node.", ("launch",), metavar="N"),
    "processes": Extra(int, 2, "Processes of each variant that takes several.", ("compare",), metavar="N"),
    "only": Extra(str, "", "Which variants to compare, as none,ddp; by default all.", ("compare",), metavar="LIST"),
    "repeats": Extra(int, 3, "Runs of each variant.", ("compare",), metavar="N"),
    "nnodes": Extra(int, 1, "Nodes; run the same command on each.", ("launch",), metavar="N"),
    "node_rank": Extra(int, 0, "Which of the nodes this is, from 0.", ("launch",), metavar="N"),
    "master_addr": Extra(str, "", "Name or address of node 0, the same on all nodes.", ("launch",), metavar="HOST"),
    "master_port": Extra(int, 0, "Port on node 0; 0 takes 29400, or a free one on a single node.", ("launch",)),
    "command": Extra(str, "train", "What the processes do.", ("launch",), choices=("train", "bench", "doctor")),
    "sizes": Extra(str, "", "Bytes of the messages, as 1K,1M,64M; by default 1K, 4K, ... to what fits.", ("bench", "launch"),
                   metavar="LIST"),
    "iterations": Extra(int, 20, "Samples of each size, at most.", ("bench", "launch"), metavar="N"),
    "seconds": Extra(float, 60.0, "Time for all measurements of the wire, about.", ("bench", "launch"), metavar="X"),
    "step_ms": Extra(float, 0.0, "Time of a step without exchange; 0 measures it.", ("bench", "launch"), metavar="X"),
    "json": Extra(bool, False, "The result as JSON too, on one line; all of it for doctor.",
                  ("bench", "doctor", "explain", "launch")),
    "launcher": Extra(str, "processes", "How: spawn goes through torch.multiprocessing.", ("launch",),
                      choices=("processes", "spawn")),
    "init_method": Extra(str, "", "tcp://HOST:PORT or file:///PATH in place of MASTER_ADDR and MASTER_PORT.",
                         ("train", "evaluate", "predict", "bench", "doctor", "launch"), metavar="URL"),
    "rank": Extra(int, None, "In place of RANK.", ("train", "evaluate", "predict", "bench", "doctor"), metavar="N"),
    "world_size": Extra(int, None, "In place of WORLD_SIZE.", ("train", "evaluate", "predict", "bench", "doctor"), metavar="N"),
    "max_restarts": Extra(int, 3, "Restarts after a lost rank, at most.", ("launch",), metavar="N"),
    "checkpoint": Extra(str, "", "Checkpoint directory; by default the newest good one of the run.",
                        ("evaluate", "predict", "export"), metavar="DIR"),
    "input": Extra(str, "", "What to predict: an image or a folder of them, a file of texts, or - for standard input; by "
                   "default the test data.", ("predict",), metavar="PATH"),
    "output": Extra(str, "", "Where to write: predictions.csv or a .jsonl; model.pt.", ("predict", "export"), metavar="FILE"),
}
