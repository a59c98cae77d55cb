"""Jobs that learn from rewards: `rollout` of a job in a run file. The rooms reach this plug-in by that key alone.

At a border of windows (changes.py) the adapters of all such jobs generate completions in one batch (drawing.py, by
engine/generate.py), turn by turn where environments and tools answer (environments.py, tools.py). Rewards judge them
(rewards.py), and they become samples of the next global batches (data.py). From there on a job is trained as any other, beside
others, by a loss of policies (engine/objectives/policy.py).
"""
