"""A service on several processes: each rank has its own device, replica of the base models, and models of clients.

Rank 0 has the HTTP server, the journal and the state. It gives each model to the rank with the least load, which from then on
is a service of its own for this model: it keeps the adapter and its optimizer, mixes its models in its own microbatches, draws
samples, and writes checkpoints and snapshots into the state folder. What it promises goes through rank 0: it reads and writes
the journal over a channel. So results are committed by one writer, and a start with any number of ranks goes on from the same
journal.

    channel.py   messages between two processes
    meeting.py   how ranks find one another
    remote.py    the journal and the figures of rank 0, as another rank uses them
    streams.py   samples of the OpenAI-style endpoint, token by token
    worker.py    a rank other than 0
    records.py   what rank 0 has of the others
    leader.py    rank 0

One process has nothing of this folder but `meeting.place_of`.
"""
