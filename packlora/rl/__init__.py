"""Jobs that learn from rewards: `rollout` of a job in a run file. The rooms reach this plug-in by that key alone.

At a border of windows, and for an evaluation, the adapters of such jobs generate completions (changes.py). Each job's
completions are a course of their own (courses.py, judging.py): turns are drawn in one batch with those of others (drawing.py,
by engine/generate.py), environments and tools answer (environments.py, tools.py), rewards judge (rewards.py). They become
samples of the next global batches, or held-out samples (data.py). From there on a job is trained as any other, beside others,
by a loss of policies (engine/objectives/policy.py).
"""
