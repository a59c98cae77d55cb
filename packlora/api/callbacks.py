def subscribers_of(callbacks): return list(callbacks)
