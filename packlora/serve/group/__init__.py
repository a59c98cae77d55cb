"""A service whose base model is cut over the processes of a host: each rank has slices of every layer (parallel/tensor.py), and
slices of every adapter.

Rank 0 is a service as one process is: HTTP, journal, queue, clock and files are its own, and it decides. Before it computes, it
tells the others what, over a channel; they do the same with their slices, and the sums inside of the layers keep all in step.
Nothing is asked back: results are whole on rank 0. What is told are an adapter that comes or leaves, values that were read from
files, a slot of the engine, whole values that are to be written, and passes of the sampler, whose tokens rank 0 draws.

An error while all compute leaves the others waiting, so it ends the service, memory that runs out included. The journal of
rank 0 has all that is promised, and the next start goes on from it, on any number of processes.

    together.py   the process group, and errors that end all
    host.py       the base model, on every rank
    told.py       what is told, as values of messages
    passes.py     passes of the sampler
    follower.py   a rank other than 0
    leader.py     rank 0

One process has nothing of this folder.
"""
